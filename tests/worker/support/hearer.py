"""A router's end of a worker's stream that keeps what it is told of load and route keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toy_worker import Exchange

from naru_proto.route_keys import unpack_keys
from naru_proto.v1 import worker_pb2


class Hearer:
    """Checks that updates fit one another, too."""

    def __init__(self, stub: Any) -> None:
        self.exchange = Exchange(stub)
        self.keys: dict[str, set[bytes]] = {}
        self.epochs: dict[str, int] = {}
        self.loads: dict[str, worker_pb2.ModelLoad] = {}
        self.load = worker_pb2.Load()
        self.counted: list[str] = []
        self.num_snapshots = 0
        self.num_updates = 0

    async def read(self) -> worker_pb2.WorkerFrame:
        frame = await self.exchange.read()
        self.load = frame.load
        self.loads |= {load.model: load for load in frame.load.models}
        if frame.load.last_request_id:
            self.counted.append(frame.load.last_request_id)
        for update in frame.route_keys:
            self.num_updates += 1
            assert update.number == self.num_updates
            added, removed = (unpack_keys(packed, max_keys=None) for packed in (update.added, update.removed))
            if update.is_snapshot:
                self.keys[update.model], self.epochs[update.model] = set(), update.epoch
                self.num_snapshots += 1
            held = self.keys[update.model]
            assert self.epochs[update.model] == update.epoch
            assert held.issuperset(removed) and held.isdisjoint(added)
            self.keys[update.model] = (held - set(removed)) | set(added)
        return frame

    async def finish(self, *request_ids: str) -> None:
        while not all(self.exchange.is_done(request_id) for request_id in request_ids):
            await self.read()


async def hear_until(hearer: Hearer, is_enough: Callable[[], object]) -> None:
    while not is_enough():
        await hearer.read()
