"""One replica's control over a cluster in memory, a real Redis and fake workers: tests take its turns one by one."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import redis
from fake_kube import FakeKube
from fake_worker import FakeWorker
from pool_world import API, READY_STATUS

from naru_operator.adapters.cluster.term import Surroundings, Term, Turns
from naru_operator.adapters.kube.errors import NotLeader
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.adapters.route_map import RouteMap
from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.pools.model import PodSettings
from naru_proto import names
from naru_proto.errors import NaruError
from naru_proto.registry import ModelRecord

NAMESPACE, OTHER_NAMESPACE = "ns", "other"
SETTINGS = PodSettings(image="naru/worker:1", redis_secret="naru-redis")


def key(name: str) -> ObjectKey:
    return ObjectKey(NAMESPACE, name)


def pool(name: str = "default", workers: int = 2, **spec: Any) -> Object:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {
        "apiVersion": API,
        "kind": "WorkerPool",
        "metadata": metadata,
        "spec": {"workers": {"min": workers}, **spec},
    }


def model(name: str, uri: str = "hf://org/one", **spec: Any) -> Object:
    """One copy of a model, unless the spec says how many."""
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"model": {"uri": uri}, "replicas": {"min": 1, "max": 1}, **spec}
    return {"apiVersion": API, "kind": "ModelDeployment", "metadata": metadata, "spec": spec}


def condition(obj: Object, kind: str) -> Object:
    """A condition of an object's status; empty where there is none."""
    found = (obj.get("status") or {}).get("conditions") or ()
    return next((dict(each) for each in found if each["type"] == kind), {})


async def moments(timeout_s: float = 20.0) -> AsyncIterator[None]:
    """One moment after the other, until the caller has seen enough; fails when time is up."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        yield
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


async def until(condition: Callable[[], object]) -> None:
    """Returns once it is true."""
    async for _ in moments():
        if condition():
            return


class ClusterRig:
    """Made by `cluster_rig`."""

    def __init__(self, route_map: RouteMap, redis_url: str) -> None:
        self.redis_url = redis_url
        self.board = redis.Redis.from_url(redis_url)
        self.route_map = route_map
        self.is_leader = True
        self.store = ObjectStore((NAMESPACE, OTHER_NAMESPACE))
        self.kube = FakeKube(self.store, lambda: self.is_leader)
        self.workers: dict[str, FakeWorker] = {}
        self.num_wakes = 0
        self.surroundings = Surroundings(
            self.store,
            self.kube,
            route_map,
            lambda: self.is_leader,
            SETTINGS,
            status_interval_s=0.0,
            resync_s=3600.0,
        )
        self.turns = Turns()
        self._version = 0
        self.term = self.new_term()

    def new_term(self, **changes: Any) -> Term:
        """As a replica that has just won the lead."""
        return Term(replace(self.surroundings, **changes), self.turns, self._wake)

    async def restart(self, **changes: Any) -> None:
        """The lead goes to a replica that knows nothing."""
        await self.term.close()
        self.term = self.new_term(**changes)

    async def look(self) -> None:
        """One look of the loop, after which what it began is done."""
        if self.store.changed.is_set():
            self.store.changed.clear()
            self._version += 1
        try:
            await self.term.look(self._version)
        except NotLeader:
            raise
        except NaruError as exc:
            self.term.fail(exc.message)
            raise
        await self.settle()

    async def settle(self) -> None:
        """Statuses, events and commands under way come to their ends."""
        ours = ("status of", "event ", "ready ", "loading ", "known ", "draining ")
        while tasks := [it for it in asyncio.all_tasks() if it.get_name().startswith(ours)]:
            await asyncio.wait(tasks, timeout=10)

    async def turn(self, count: int = 1) -> None:
        """Full turns, whether anything has changed or not; workers renew their leases before each."""
        for _ in range(count):
            for worker in self.workers.values():
                await worker.renew()
            self._version += 1
            await self.look()

    async def converge(self, num_turns: int = 8) -> None:
        """Turns until one writes nothing."""
        for _ in range(num_turns):
            before = (len(self.kube.writes), self.board.hgetall(names.KEY_MODELS), self.num_commands)
            await self.turn()
            if before == (len(self.kube.writes), self.board.hgetall(names.KEY_MODELS), self.num_commands):
                return
        raise AssertionError(f"it still writes: {self.kube.writes[-4:]}")

    async def start_worker(self, name: str, *, has_pod: bool = True) -> FakeWorker:
        """A worker with a lease; its pod becomes ready."""
        worker = FakeWorker(name, self.redis_url)
        self.workers[name] = worker
        await worker.start()
        if has_pod:
            self.make_ready(name)
        return worker

    def make_ready(self, name: str) -> None:
        """The kubelet says that a pod is ready."""
        self.kube.set_status("Pod", key(name), copy.deepcopy(READY_STATUS))

    async def lose_worker(self, name: str) -> None:
        """Its process is gone, and its lease has expired."""
        await self.workers.pop(name).stop()
        self.board.delete(names.key_worker(name))

    @property
    def num_commands(self) -> int:
        """Loads and unloads that workers have seen."""
        return sum(len(worker.loads) + len(worker.unloads) for worker in self.workers.values())

    def records(self) -> dict[str, ModelRecord]:
        """The registry."""
        stored: dict[bytes, bytes] = self.board.hgetall(names.KEY_MODELS)  # type: ignore[assignment]
        return {name.decode(): ModelRecord.from_json(text) for name, text in stored.items()}

    def get(self, kind: str, name: str) -> Object:
        """An object as the API server has it."""
        return self.kube.objects[kind, key(name)]

    def phase(self, kind: str, name: str) -> str:
        """Of an object's status."""
        return str((self.get(kind, name).get("status") or {}).get("phase", ""))

    def _wake(self) -> None:
        self.num_wakes += 1


@asynccontextmanager
async def cluster_rig(route_map: RouteMap, redis_url: str) -> AsyncIterator[ClusterRig]:
    """A rig over an empty cluster; leaving ends all it began."""
    rig = ClusterRig(route_map, redis_url)
    try:
        yield rig
    finally:
        await rig.term.close()
        for worker in rig.workers.values():
            await worker.stop()
        rig.board.close()
