"""Workers as every router's load desk sees them, and desks of routers that share a Redis and nothing else."""

from __future__ import annotations

import asyncio

import redis.asyncio

from naru_proto import names
from naru_proto.errors import NaruError
from naru_proto.registry import LeaseRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.leases import Leases
from naru_router.adapters.load_desk import LoadDesk
from naru_router.adapters.load_site import Site

MODEL = "m"
KEY = names.key_load_lease(MODEL)


class World:
    """Workers, as every router sees them."""

    def __init__(self, *workers: str) -> None:
        self.reachable = set(workers)
        self.states: dict[tuple[str, str], str] = {}
        self.moves: list[tuple[str, worker_pb2.MoveRequest]] = []
        self.refusals: dict[str, list[NaruError]] = {}
        self.unknown: list[tuple[str, str]] = []
        self.eta_s = 0.0
        self.reply_state = worker_pb2.MODEL_STATE_LOADING
        self._change = asyncio.Event()

    def notify(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()

    def show(self, worker_id: str, state: str, model: str = MODEL) -> None:
        self.states[worker_id, model] = state
        self.notify()

    def lose(self, worker_id: str) -> None:
        self.reachable.discard(worker_id)
        self.notify()

    # What the desk asks.

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        self.moves.append((worker_id, request))
        await asyncio.sleep(0)
        if self.refusals.get(worker_id):
            raise self.refusals[worker_id].pop(0)
        self.show(worker_id, "loading", request.model)
        return worker_pb2.MoveReply(state=self.reply_state, eta_s=self.eta_s)

    def can_load(self, worker_id: str, model: str) -> bool:
        return worker_id in self.reachable and (worker_id, model) not in self.unknown

    def state(self, worker_id: str, model: str) -> str:
        return self.states.get((worker_id, model), "")

    def is_served(self, model: str) -> bool:
        return any(state == "ready" and w in self.reachable for (w, m), state in self.states.items() if m == model)

    def mark_unknown(self, worker_id: str, model: str) -> None:
        self.unknown.append((worker_id, model))

    async def changed(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            pass

    # What tests ask.

    def choose(self, avoid: frozenset[str]) -> str | None:
        return min(self.reachable - avoid, default=None)

    @property
    def told(self) -> list[str]:
        return [worker_id for worker_id, _ in self.moves]

    @property
    def tokens(self) -> list[int]:
        return [request.fencing_token for _, request in self.moves]


class Counted(Leases):
    """Leases whose questions are counted, and that can hang or fail."""

    num_asked = 0
    hangs = False

    async def take(self, key: str, ttl_s: float, worker_id: str = "") -> LeaseRecord | None:
        await self._ask()
        return await super().take(key, ttl_s, worker_id)

    async def read(self, key: str) -> LeaseRecord | None:
        await self._ask()
        return await super().read(key)

    async def _ask(self) -> None:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()


class Router:
    """A desk of its own."""

    def __init__(self, world: World, client: redis.asyncio.Redis, name: str) -> None:
        self.leases = Counted(client, name)
        self.desk = LoadDesk(self.leases, world, router_id=name)
        self._world = world

    async def where(self, avoid: frozenset[str] = frozenset()) -> Site | None:
        async with asyncio.timeout(10):
            return await self.desk.where(MODEL, self._world.choose, avoid)
