"""What placement wants to know beside leases: what models take, and what workers have near without holding it.

Read by the registry reader on the way, and seldom: a worker's table when its lease says that it has changed, the
others every few seconds. What cannot be read is left out, be it an entry or a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import redis.asyncio

from naru_proto import names
from naru_proto.errors import InternalError
from naru_proto.placement.facts import read_labels
from naru_proto.registry import FootprintRecord, KnownRecord, WorkerRecord
from naru_router.core.record_checks import is_footprint, is_known

SLOW_INTERVAL_S = 10.0
MAX_ENTRIES = 100_000
"""Of one table; a longer one is not ours."""

_R = TypeVar("_R", KnownRecord, FootprintRecord)


class SideTables:
    """All tables as last read. Mutable."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.footprints: dict[str, FootprintRecord] = {}
        """By registry name of a model."""
        self.nodes: dict[str, Mapping[str, str]] = {}
        """Labels by node, where the operator has told them."""
        self._clock = clock
        self._known: dict[str, tuple[tuple[str, int], dict[str, KnownRecord]]] = {}
        """Worker id to what version of whose table that is, and the table."""
        self._slow_at_s: float | None = None

    @property
    def known(self) -> Mapping[str, Mapping[str, KnownRecord]]:
        """Worker id to model to what it has of it."""
        return {worker_id: table for worker_id, (_, table) in self._known.items()}

    async def refresh(self, client: redis.asyncio.Redis, workers: Mapping[str, WorkerRecord]) -> bool:
        """Reads what has changed; whether there was anything to read.

        Raises:
            RedisError, OSError: as the client does.
        """
        gone = self._known.keys() - workers.keys()
        for worker_id in gone:
            del self._known[worker_id]
        versions = {worker_id: (worker.epoch, worker.known_version) for worker_id, worker in workers.items()}
        changed = [worker_id for worker_id, version in versions.items() if self._version(worker_id) != version]
        tables = await _read(client, [names.key_known(worker_id) for worker_id in changed])
        for worker_id, raw in zip(changed, tables, strict=True):
            self._known[worker_id] = versions[worker_id], _decoded(raw, KnownRecord, is_known)
        now_s = self._clock()
        if self._slow_at_s is not None and now_s - self._slow_at_s < SLOW_INTERVAL_S:
            return bool(gone or changed)
        footprints, nodes = await _read(client, [names.KEY_FOOTPRINTS, names.KEY_NODES])
        self.footprints = _decoded(footprints, FootprintRecord, is_footprint)
        self.nodes = {_text(node): labels for node, data in nodes.items() if (labels := read_labels(data)) is not None}
        self._slow_at_s = now_s
        return True

    def _version(self, worker_id: str) -> tuple[str, int] | None:
        known = self._known.get(worker_id)
        return None if known is None else known[0]


async def _read(client: redis.asyncio.Redis, keys: Sequence[str]) -> list[dict[bytes, bytes]]:
    """The hashes under the keys, all in two exchanges; empty where one is too long or none at all."""
    if not keys:
        return []
    async with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hlen(key)
        # An answer that is an error, as of a key that holds something else, is given in its place.
        lengths = await pipe.execute(raise_on_error=False)
        is_ours = [isinstance(length, int) and 0 < length <= MAX_ENTRIES for length in lengths]
        for key, is_read in zip(keys, is_ours, strict=True):
            if is_read:
                pipe.hgetall(key)
        found = iter(await pipe.execute(raise_on_error=False))
    tables = [next(found) if is_read else {} for is_read in is_ours]
    return [table if isinstance(table, dict) else {} for table in tables]


def _decoded(raw: Mapping[bytes, bytes], record: type[_R], is_sane: Callable[[str, _R], bool]) -> dict[str, _R]:
    found = {}
    for name, data in raw.items():
        model = _text(name)
        try:
            value = record.from_json(data)
        except InternalError:
            continue
        if is_sane(model, value):
            found[model] = value
    return found


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
