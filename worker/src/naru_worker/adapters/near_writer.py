"""Writes to the route map what placement goes by: what this worker has near, and what its models take.

Called by the lease keeper, before the lease where there is news. Written when it has changed, or Redis has lost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from naru_proto import names
from naru_proto.registry import FootprintRecord, KnownRecord
from naru_worker.adapters.near_models import NearModels

TTL_MS = 30_000
"""Of what is near: renewed with each lease, outlives a few that fail."""


class NearWriter:
    """asyncio thread only."""

    def __init__(self, near: NearModels, worker_id: str) -> None:
        self._near, self._lease_key, self._key = near, names.key_worker(worker_id), names.key_known(worker_id)
        self._version: int | None = None
        """Of what is near, as last written; None: nothing that this life wrote stands there."""
        self._told: dict[str, FootprintRecord] = {}

    @property
    def version(self) -> int:
        """Of what stands in the route map: a lease that names it must not promise more."""
        return self._version or 0

    @property
    def has_news(self) -> bool:
        """Whether there is more to write than that it lasts; a lease that names it must wait for it."""
        return self._near.version != self._version or bool(self._news())

    def renew(self, pipe: Any) -> int:
        """Adds to a pipeline what lets it last; the number of commands, whose replies say whether it was there."""
        if not self._near.records:
            return 0
        pipe.pexpire(self._key, TTL_MS)
        return 1

    def forget(self) -> None:
        """Redis has lost it: all of it is news."""
        self._version, self._told = None, {}

    async def write(self, client: Any) -> None:
        """Writes what is news, before a lease. Raises what the client raises."""
        if self._version is not None and not await client.exists(self._lease_key):
            # The last lease is gone, so that Redis was emptied or away for long.
            self.forget()
        version, known, news = self._near.version, self._near.records, self._news()
        pipe = client.pipeline(transaction=True)
        if version != self._version:
            pipe.delete(self._key)
            if known:
                pipe.hset(self._key, mapping=_texts(known))
        if known:
            pipe.pexpire(self._key, TTL_MS)
        if news:
            pipe.hset(names.KEY_FOOTPRINTS, mapping=_texts(news))
        if pipe.command_stack:
            await pipe.execute()
        self._version = version
        self._told |= news

    def _news(self) -> dict[str, FootprintRecord]:
        return {name: each for name, each in self._near.footprints().items() if self._told.get(name) != each}

    def erase(self, pipe: Any) -> None:
        """Adds to a pipeline what takes this worker's entry away; footprints stay, they are true elsewhere too."""
        pipe.delete(self._key)


def _texts(records: Mapping[str, KnownRecord] | Mapping[str, FootprintRecord]) -> dict[str, str]:
    return {name: record.to_json() for name, record in records.items()}
