"""A cluster in memory for tests of pools: pods as JSON, leases, claims, and time that only moves when told."""

from __future__ import annotations

import copy
import datetime
from dataclasses import dataclass, field
from typing import Any

from naru_operator.core.kube import Object
from naru_operator.core.pools.model import PodSettings, PoolPlan, PoolSnapshot
from naru_operator.core.pools.observe import observe_pod
from naru_operator.core.pools.plan import plan_pool
from naru_operator.core.pools.pod_manifest import worker_pod
from naru_proto.crd.v1alpha1 import WorkerPool
from naru_proto.registry import ResidentRecord, WorkerRecord

API = "serving.naru.dev/v1alpha1"
UID = "pool-uid"
START_S = 1_750_000_000.0
SETTINGS = PodSettings(image="naru/worker:1", redis_secret="naru-redis")
READY_STATUS: Object = {
    "phase": "Running",
    "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "worker", "ready": True, "restartCount": 0, "state": {"running": {}}}],
}


def timestamp(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, tz=datetime.UTC).isoformat(timespec="seconds")


def raw_pool(name: str = "p", **spec: Any) -> Object:
    metadata = {"name": name, "namespace": "ns", "uid": UID, "generation": 3}
    return {"apiVersion": API, "kind": "WorkerPool", "metadata": metadata, "spec": spec}


def make_pool(name: str = "p", **spec: Any) -> WorkerPool:
    return WorkerPool.model_validate(raw_pool(name, **spec))


def lease(name: str, *, pool: str = "p", **fields: Any) -> WorkerRecord:
    fields = {"budget_bytes": 1 << 30, "models": {}, **fields}
    return WorkerRecord(worker_id=name, address="10.0.0.1:9090", epoch="e", pool=pool, **fields)


def held(state: str = "ready") -> ResidentRecord:
    return ResidentRecord(state=state, generation=1)


@dataclass
class Cluster:
    """Pods of one pool; steps of a plan are carried out at once, all else happens when a test says so."""

    raw: Object
    settings: PodSettings = SETTINGS
    now_s: float = START_S
    pods: dict[str, Object] = field(default_factory=dict)
    leases: dict[str, WorkerRecord] = field(default_factory=dict)
    claims: dict[str, str] = field(default_factory=dict)
    taken_names: frozenset[str] = frozenset()
    has_registry: bool = True

    def snapshot(self) -> PoolSnapshot:
        return PoolSnapshot(
            pool=WorkerPool.model_validate(self.raw),
            raw=self.raw,
            pods=tuple(observe_pod(raw) for raw in self.pods.values()),
            workers=dict(self.leases) if self.has_registry else {},
            claims=dict(self.claims),
            settings=self.settings,
            taken_names=self.taken_names,
        )

    def plan(self) -> PoolPlan:
        return plan_pool(self.snapshot(), now_s=self.now_s)

    def turn(self) -> PoolPlan:
        """Plans and carries out."""
        plan = self.plan()
        for item in plan.create:
            name = item["metadata"]["name"]
            assert name not in self.pods, f"{name} is created while a pod of that name is there"
            self.pods[name] = self._admitted(item)
        for each in plan.delete:
            pod = self.pods[each.key.name]
            assert pod["metadata"]["uid"] == each.uid
            self.terminate(each.key.name)
        for item in plan.apply:
            if item["kind"] == "PersistentVolumeClaim":
                self.claims.setdefault(item["metadata"]["name"], "Pending")
        return plan

    def _admitted(self, item: Object) -> Object:
        pod = copy.deepcopy(item)
        created = {"uid": f"{item['metadata']['name']}@{self.now_s}", "creationTimestamp": timestamp(self.now_s)}
        pod["metadata"] |= created
        pod["status"] = {"phase": "Pending"}
        return pod

    # --- what happens to pods --------------------------------------------------------------------------------------

    def become_ready(self, name: str, **fields: Any) -> None:
        self.pods[name]["spec"]["nodeName"] = "n0"
        self.pods[name]["status"] = copy.deepcopy(READY_STATUS)
        self.leases[name] = lease(name, pool=self.raw["metadata"]["name"], **fields)

    def become_unready(self, name: str, waiting: Object | None = None) -> None:
        state = {"waiting": waiting} if waiting else {"running": {}}
        status = {"name": "worker", "ready": False, "restartCount": 1, "state": state}
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
        self.pods[name]["status"] = {"phase": "Running", "conditions": conditions, "containerStatuses": [status]}
        self.leases.pop(name, None)

    def be_unschedulable(self, name: str, message: str, reason: str = "Unschedulable") -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
        self.pods[name]["status"] = {"phase": "Pending", "conditions": [condition]}

    def evict(self, name: str) -> None:
        self.pods[name]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        self.leases.pop(name, None)

    def terminate(self, name: str) -> None:
        self.pods[name]["metadata"].setdefault("deletionTimestamp", timestamp(self.now_s))

    def vanish(self, name: str) -> None:
        del self.pods[name]
        self.leases.pop(name, None)

    # --- what is seen ----------------------------------------------------------------------------------------------

    def living(self) -> list[str]:
        return sorted(
            name
            for name, pod in self.pods.items()
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        )

    def terminating(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if "deletionTimestamp" in pod["metadata"])

    def ready(self) -> list[str]:
        return [name for name in self.living() if observe_pod(self.pods[name]).is_ready and name in self.leases]

    def settle(self, max_turns: int = 200) -> int:
        """Pods do what is asked of them until no plan has steps; returns the turns it took."""
        for turn in range(max_turns):
            plan = self.turn()
            if not (plan.create or plan.delete) and not self.terminating() and self.ready() == self.living():
                return turn
            for name in self.terminating():
                self.vanish(name)
            for name in set(self.living()) - set(self.ready()):
                self.become_ready(name)
            self.now_s += 31.0
        raise AssertionError(f"not settled after {max_turns} turns: {self.pods}")


def running_cluster(num_workers: int = 1, name: str = "p", **spec: Any) -> Cluster:
    """A pool whose workers are all ready."""
    cluster = Cluster(raw_pool(name, workers={"min": num_workers}, **spec))
    cluster.settle()
    return cluster


def created(plan: PoolPlan) -> list[str]:
    return [item["metadata"]["name"] for item in plan.create]


def deleted(plan: PoolPlan) -> list[str]:
    return [each.key.name for each in plan.delete]


def change(cluster: Cluster, **spec: Any) -> None:
    cluster.raw = {**cluster.raw, "spec": {**cluster.raw["spec"], **spec}}


def rolling(num_workers: int, **rollout: Any) -> Cluster:
    """A pool whose image has just changed."""
    cluster = running_cluster(num_workers, image="naru/worker:a", rollout=rollout)
    change(cluster, image="naru/worker:b")
    return cluster


def pod(settings: PodSettings = SETTINGS, slot: int = 0, **spec: Any) -> Object:
    return worker_pod(make_pool(**spec), raw_pool(**spec), slot, settings)


def container(item: Object) -> Object:
    (only,) = item["spec"]["containers"]
    assert isinstance(only, dict)
    return only
