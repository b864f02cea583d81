"""What workers say of themselves in the route map, and the registry as we wrote it: read cheaply, compared, remembered.

Called by the term at each look. The registry has one writer, this process, so it is read only when that may have
changed: at the start, when Redis was away or was emptied, and once in a while.

A lease that is absent means a worker that is gone, unless Redis itself lost it: after it was away, slow or emptied,
workers need a moment to write their leases again. Until then those that were known count as alive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum

from naru_operator.adapters.route_map import Board, RouteMap
from naru_operator.core.placement import NO_FACTS, PlacementFacts
from naru_proto import names
from naru_proto.errors import Unavailable
from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord

_REREAD_S = 300.0
"""Between two readings of the whole registry: a record may have been changed by another hand."""
DOUBT_S = 10.0
"""After a fault of Redis, absent leases are not believed to be gone for so long: longer than workers, which pause for
5 s at most between their tries, need to write them again."""
_SLOW_S = names.WORKER_LEASE_TTL_S / 2
"""An answer that took longer may show leases as expired that nobody could renew meanwhile."""


class Change(Enum):
    """What a refresh has shown."""

    NOTHING = "nothing"
    USE = "use"
    """Requests in flight, bytes, progress of loads, last uses: nothing a plan depends on."""
    NEWS = "news"


class Leases:
    """The board as last read. asyncio thread only."""

    def __init__(self, route_map: RouteMap, on_gone: Callable[[str], None]) -> None:
        """``on_gone`` is told of every worker whose life has ended: its lease went, or a new process has its name."""
        self._route_map = route_map
        self._on_gone = on_gone
        self.board = Board({}, {})
        self._facts = NO_FACTS
        self._read_s: float | None = None
        """When the registry was read; None: it must be."""
        self._num_unreadable = 0
        """Entries of the registry that are no records."""
        self._found: frozenset[str] = frozenset()
        """Workers whose leases the last reading found."""
        self._has_failed = False
        self._doubt_until_s = 0.0
        self._known_since_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether leases were read at all."""
        return self._known_since_s is not None

    @property
    def known_s(self) -> float:
        """Seconds since leases were first read; 0 before."""
        return 0.0 if self._known_since_s is None else time.monotonic() - self._known_since_s

    @property
    def is_certain(self) -> bool:
        """Whether a worker that is absent here is gone: nothing may be deleted for its absence otherwise."""
        return self.is_known and not self._has_failed and time.monotonic() >= self._doubt_until_s

    async def refresh(self) -> Change:
        """Reads; returns what has changed since the last time.

        Raises:
            Unavailable: Redis does not answer; what was known stays, and all is read anew next time.
        """
        began_s = time.monotonic()
        try:
            found = await self._read(began_s)
        except BaseException:
            self._read_s, self._has_failed = None, True
            raise
        now_s, before = time.monotonic(), self.board
        if self.is_known and self._is_doubtful(found, now_s - began_s):
            self._doubt_until_s = now_s + DOUBT_S
        self._has_failed = False
        self._found = frozenset(found.workers)
        if self._known_since_s is None:
            self._known_since_s = now_s
        kept = self._kept(before, found) if now_s < self._doubt_until_s else {}
        self.board = Board(found.models, {**found.workers, **kept})
        for worker_id, record in before.workers.items():
            now = self.board.workers.get(worker_id)
            if now is None or now.epoch != record.epoch:
                self._on_gone(worker_id)
        return _change(before, self.board)

    async def placement_facts(self) -> PlacementFacts:
        """What placement goes by beside leases and registry; the last one that was read while Redis does not answer."""
        with contextlib.suppress(Unavailable):
            self._facts = await self._route_map.placement.read(self.board.workers)
        return self._facts

    async def write_nodes(self, nodes: Mapping[str, Mapping[str, str]], gone: Iterable[str]) -> None:
        """Puts labels of nodes where routers read them.

        Raises:
            Unavailable: Redis does not answer.
        """
        await self._route_map.placement.write_nodes(nodes, gone)

    async def write(self, put: Iterable[ModelRecord], delete: Iterable[str]) -> None:
        """Changes the registry.

        Raises:
            Unavailable: Redis does not answer; nothing or all was written.
        """
        put, delete = tuple(put), frozenset(delete)
        if not put and not delete:
            return
        try:
            await self._route_map.write_models(put, sorted(delete))
        except BaseException:
            self._read_s = None
            raise
        models = {name: record for name, record in self.board.models.items() if name not in delete}
        models.update({record.name: record for record in put})
        self.board = Board(models, self.board.workers)

    async def _read(self, now_s: float) -> Board:
        if self._read_s is not None and now_s - self._read_s <= _REREAD_S:
            workers = await self._route_map.read_workers(self.board.workers)
            # Asked after the leases: those of a Redis that was emptied in between are still all there.
            if await self._route_map.num_models() == len(self.board.models) + self._num_unreadable:
                return Board(self.board.models, workers)
        board = await self._route_map.read()
        self._num_unreadable = max(0, await self._route_map.num_models() - len(board.models))
        self._read_s = now_s
        return board

    def _is_doubtful(self, found: Board, took_s: float) -> bool:
        is_emptied = bool(self.board.models) and not found.models
        are_all_lost = bool(self._found) and not found.workers
        return self._has_failed or is_emptied or are_all_lost or took_s > _SLOW_S

    def _kept(self, before: Board, found: Board) -> dict[str, WorkerRecord]:
        """Workers that are believed without a lease; one that said that it leaves has left."""
        return {
            worker_id: record
            for worker_id, record in before.workers.items()
            if worker_id not in found.workers and not (record.leaving or record.draining)
        }


def _change(before: Board, now: Board) -> Change:
    are_same_models = before.models is now.models or before.models == now.models
    if not are_same_models or before.workers.keys() != now.workers.keys():
        return Change.NEWS
    change = Change.NOTHING
    for worker_id, record in now.workers.items():
        old = before.workers[worker_id]
        if old is record or old == record:
            continue
        if _still(old) != _still(record):
            return Change.NEWS
        change = Change.USE
    return change


def _still(record: WorkerRecord) -> WorkerRecord:
    """A lease without what changes with every request."""
    models = {name: _still_resident(resident) for name, resident in record.models.items()}
    return replace(
        record, num_running=0, num_waiting=0, used_bytes=0, host_used_bytes=0, known_version=0, models=models
    )


def _still_resident(resident: ResidentRecord) -> ResidentRecord:
    return replace(resident, num_bytes=0, kv_bytes=0, num_in_flight=0, bytes_done=0, eta_s=0.0, last_used_s=0)
