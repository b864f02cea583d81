"""What placement goes by beside leases and registry, in Redis: footprints, what workers have near, labels of nodes.

Workers write the first two, this process the third, for routers. Part of the route map. Nothing of it must be there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import TypeVar

import redis.asyncio
import redis.exceptions

from naru_operator.core.placement import PlacementFacts
from naru_proto import names
from naru_proto.errors import NaruError, Unavailable
from naru_proto.placement import read_labels
from naru_proto.registry import FootprintRecord, KnownRecord, WorkerRecord

_R = TypeVar("_R", FootprintRecord, KnownRecord)
_TIMEOUT_S = 5.0


class PlacementBoard:
    """Reads and writes through the route map's connection."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._near: dict[str, tuple[str, int, Mapping[str, KnownRecord]]] = {}
        """Worker to its epoch, the version of what it has near, and that."""

    async def read(self, workers: Mapping[str, WorkerRecord]) -> PlacementFacts:
        """All of it; what cannot be read counts as absent.

        What a worker has near is read again only when its lease says that it has changed.

        Raises:
            Unavailable: Redis does not answer.
        """
        stale = [
            record
            for worker_id, record in workers.items()
            if self._near.get(worker_id, ("", 0, {}))[:2] != (record.epoch, record.known_version)
        ]
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._client.pipeline(transaction=False) as batch:
                batch.hgetall(names.KEY_FOOTPRINTS)
                batch.hgetall(names.KEY_NODES)
                for record in stale:
                    batch.hgetall(names.key_known(record.worker_id))
                footprints, nodes, *found = await batch.execute()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc
        for record, known in zip(stale, found, strict=True):
            self._near[record.worker_id] = (record.epoch, record.known_version, _read_all(KnownRecord, known))
        self._near = {worker_id: each for worker_id, each in self._near.items() if worker_id in workers}
        return PlacementFacts(
            _read_all(FootprintRecord, footprints),
            {worker_id: known for worker_id, (_, _, known) in self._near.items()},
            {_text(node): labels for node, text in nodes.items() if (labels := read_labels(text)) is not None},
        )

    async def write_nodes(self, nodes: Mapping[str, Mapping[str, str]], gone: Iterable[str]) -> None:
        """Puts the labels of nodes that copies are spread over where routers read them.

        Raises:
            Unavailable: Redis does not answer.
        """
        gone = list(gone)
        if not nodes and not gone:
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._client.pipeline(transaction=True) as batch:
                for node, labels in nodes.items():
                    batch.hset(names.KEY_NODES, node, json.dumps(dict(labels), sort_keys=True))
                if gone:
                    batch.hdel(names.KEY_NODES, *gone)
                await batch.execute()
        except (redis.exceptions.RedisError, OSError, TimeoutError) as exc:
            raise _away(exc) from exc


def _read_all(kind: type[_R], stored: Mapping[bytes | str, bytes | str]) -> dict[str, _R]:
    """A hash of records; those that cannot be read are left out."""
    records = ((_text(name), _read_record(kind, text)) for name, text in stored.items())
    return {name: record for name, record in records if record is not None}


def _read_record(kind: type[_R], text: bytes | str) -> _R | None:
    try:
        return kind.from_json(text)
    except NaruError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _away(exc: BaseException) -> Unavailable:
    return Unavailable(f"Redis does not answer ({type(exc).__name__}: {exc}); check that it runs and --redis-url")
