"""A cluster's models in virtual time: objects, registry and workers that do what plans say, and a check of every plan.

Workers load and give up models one `advance` later; what a URI with "bad" in it names can never be loaded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from naru_operator.core.desired import Tier
from naru_operator.core.kube import Object, ObjectKey, key_of
from naru_operator.core.model_plan import AT_REST, KNOWN, Applied, LoadModel, ObservedModel, UnloadModel
from naru_operator.core.models.facts import model_facts
from naru_operator.core.models.model import ClusterWorker, ModelsPlan, ModelsSnapshot, Verdict
from naru_operator.core.models.plan import plan_models
from naru_operator.core.models.status import model_status
from naru_operator.core.placement import NO_FACTS
from naru_proto import names
from naru_proto.crd.units import timestamp_of
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentStatus, WorkerPool
from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord

API = "serving.naru.dev/v1alpha1"
START_S = 1_700_000_000
COPY_BYTES = 10


def fixed(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with as many copies at most as at least, unless it says how many there may be; None: any number."""
    replicas = dict(spec.get("replicas") or {"min": 1})
    replicas.setdefault("max", max(1, replicas.get("min", 1)))
    return {**spec, "replicas": {name: value for name, value in replicas.items() if value is not None}}


def raw_model(name: str, namespace: str = "default", created_s: int = START_S, **spec: Any) -> Object:
    """A ModelDeployment as the API server holds it; see `fixed`."""
    return {
        "apiVersion": API,
        "kind": "ModelDeployment",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}-{created_s}",
            "generation": 1,
            "creationTimestamp": timestamp_of(created_s).isoformat(),
        },
        "spec": {"model": {"uri": f"pypi://{name}"}, **fixed(spec)},
    }


def raw_pool(name: str, labels: dict[str, str] | None = None, created_s: int = START_S, **spec: Any) -> Object:
    """A WorkerPool as the API server holds it."""
    metadata = {"name": name, "labels": labels or {}, "creationTimestamp": timestamp_of(created_s).isoformat()}
    return {"apiVersion": API, "kind": "WorkerPool", "metadata": metadata, "spec": spec}


@dataclass
class Held:
    """A model on a worker."""

    state: str
    generation: int
    uri: str
    in_flight: int = 0
    last_used_s: int = 0
    age: int = 0
    """Steps of its load that are done."""


@dataclass
class Worker:
    """A worker's process."""

    pool: str
    budget_bytes: int = 0
    models: dict[str, Held] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    leaving: bool = False
    node: str = ""

    def record(self, worker_id: str) -> WorkerRecord:
        """Its lease."""
        models = {
            name: ResidentRecord(
                held.state,
                held.generation,
                error="no such package" if held.state == "failed" else "",
                num_bytes=COPY_BYTES if held.state == "ready" else 0,
                weight_bytes=COPY_BYTES if held.state == "ready" else 0,
                num_in_flight=held.in_flight,
                last_used_s=held.last_used_s,
            )
            for name, held in self.models.items()
            if held.state not in AT_REST
        }
        used = sum(record.num_bytes for record in models.values())
        return WorkerRecord(
            worker_id,
            "x:1",
            "e",
            models,
            pool=self.pool,
            budget_bytes=self.budget_bytes,
            used_bytes=used,
            leaving=self.leaving,
            node=self.node,
        )


class World:
    """Everything there is. `turn` plans once and carries the plan out; `advance` lets the workers go on."""

    def __init__(self, *pools: Object, **workers: str) -> None:
        """``workers``: id to pool; '_' in an id stands for '-'."""
        self.pools = {pool["metadata"]["name"]: pool for pool in pools or (raw_pool("p"),)}
        self.workers = {worker_id.replace("_", "-"): Worker(pool) for worker_id, pool in workers.items()}
        self.objects: dict[ObjectKey, Object] = {}
        self.statuses: dict[ObjectKey, ModelDeploymentStatus] = {}
        self.invalid: dict[ObjectKey, str] = {}
        self.revisions: dict[ObjectKey, Object] = {}
        self.records: dict[str, ModelRecord] = {}
        self.applied: Mapping[str, Applied] = {}
        self.started_s: Mapping[str, int] = {}
        self.refused: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.facts = NO_FACTS
        self.now_s = START_S + 1000
        self.is_uneven = False
        """Loads take one step on the first worker, two on the second and so on."""

    def apply(self, raw: Object) -> ObjectKey:
        """`kubectl apply`: counts the generation where the spec differs."""
        raw = copy.deepcopy(raw)
        key = key_of(raw)
        before = self.objects.get(key)
        if before is not None:
            changed = before["spec"] != raw["spec"]
            raw["metadata"] = {**before["metadata"], "generation": before["metadata"]["generation"] + changed}
        self.objects[key] = raw
        return key

    def edit(self, name: str, namespace: str = "default", **spec: Any) -> None:
        """Changes fields of a spec; see `fixed`."""
        raw = self.objects[ObjectKey(namespace, name)]
        self.apply({**raw, "spec": {**raw["spec"], **(fixed(spec) if "replicas" in spec else spec)}})

    def delete(self, key: ObjectKey) -> None:
        """`kubectl delete`; the garbage collector takes its revisions."""
        uid = self.objects.pop(key)["metadata"]["uid"]
        self.statuses.pop(key, None)
        self.invalid.pop(key, None)
        for place, raw in list(self.revisions.items()):
            if raw["metadata"]["ownerReferences"][0]["uid"] == uid:
                del self.revisions[place]

    def restart_operator(self) -> None:
        """What it had in memory is lost."""
        self.applied, self.started_s, self.refused, self.failed = {}, {}, {}, {}

    def snapshot(self) -> ModelsSnapshot:
        """As the operator sees it."""
        return ModelsSnapshot(
            deployments=tuple(self._parsed(key) for key in self.objects if key not in self.invalid),
            invalid=dict(self.invalid),
            raw={key: self._with_status(key) for key in self.objects},
            pools=tuple(WorkerPool.model_validate(pool) for pool in self.pools.values()),
            workers=self.cluster_workers(),
            records=dict(self.records),
            revisions=tuple(self.revisions.values()),
            applied=self.applied,
            refused=dict(self.refused),
            failed=dict(self.failed),
            placement=self.facts,
            started_s=self.started_s,
        )

    def cluster_workers(self) -> dict[str, ClusterWorker]:
        """Leases, and what they lead to."""
        return {
            worker_id: ClusterWorker(
                worker.record(worker_id),
                {name: ObservedModel(held.state, held.generation) for name, held in worker.models.items()},
            )
            for worker_id, worker in self.workers.items()
        }

    def plan(self) -> ModelsPlan:
        """What is to be done now."""
        return plan_models(self.snapshot(), now_s=self.now_s)

    def turn(self) -> ModelsPlan:
        """Plans and carries it out; a plan that must never be is an AssertionError."""
        ready = self.num_ready
        before = {name: record.target for name, record in self.records.items() if record.target}
        plan = self.plan()
        self._write_revisions(plan)
        self._write_records(plan)
        for name, record in self.records.items():
            if record.target:
                assert record.target in self.records, f"{name} leads nowhere"
                old = before.get(name, record.target)
                assert ready(record.target) >= ready(old) or ready(old) == 0, f"{name} moved too early"
        for unload in plan.unload_models:
            self._unload(unload)
        for load in plan.load_models:
            self._load(load)
        self.applied, self.started_s = plan.applied, plan.started_s
        self._write_statuses(plan)
        return plan

    def advance(self, seconds: int = 2) -> bool:
        """Time passes and workers go on; whether anything moved."""
        self.now_s += seconds
        moved = False
        for index, worker in enumerate(self.workers.values()):
            for name, held in list(worker.models.items()):
                if held.state == "draining":
                    del worker.models[name]
                    moved = True
                elif held.state == "loading":
                    held.age += 1
                    moved = True
                    if held.age > index or not self.is_uneven:
                        held.state = "failed" if "bad" in held.uri else "ready"
        return moved

    def settle(self, max_turns: int = 80) -> None:
        """Until nothing is left to do and nothing moves."""
        num_quiet = 0
        for _ in range(max_turns):
            plan = self.turn()
            moved = self.advance()
            num_quiet = 0 if moved or not plan.is_empty else num_quiet + 1
            if num_quiet > 4:  # longer than an old revision is kept
                return
        raise AssertionError(f"the plan never rests: {self.plan().reasons}")

    def num_ready(self, name: str) -> int:
        """Copies that take requests."""
        return len(self.ready_on(name))

    def ready_on(self, name: str) -> list[str]:
        """Workers whose copy takes requests."""
        return sorted(
            worker_id
            for worker_id, worker in self.workers.items()
            if name in worker.models and worker.models[name].state == "ready"
        )

    def states(self, name: str) -> dict[str, str]:
        """Worker to the state of its copy."""
        return {w: worker.models[name].state for w, worker in self.workers.items() if name in worker.models}

    def target(self, name: str) -> str:
        """What an entry leads to."""
        return self.records[name].target

    def _parsed(self, key: ObjectKey) -> ModelDeployment:
        return ModelDeployment.model_validate(self._with_status(key))

    def _with_status(self, key: ObjectKey) -> Object:
        status = self.statuses.get(key)
        return {**self.objects[key], "status": status.to_wire() if status is not None else {}}

    def _write_revisions(self, plan: ModelsPlan) -> None:
        for raw in plan.create_revisions:
            assert key_of(raw) not in self.revisions, "a revision is made twice"
            self.revisions[key_of(raw)] = raw
        for key in plan.delete_revisions:
            del self.revisions[key]

    def _write_records(self, plan: ModelsPlan) -> None:
        for record in plan.put_records:
            old = self.records.get(record.name)
            assert old is None or record.generation >= old.generation, "a generation fell"
            self.records[record.name] = record
        for name in plan.delete_records:
            del self.records[name]

    def _unload(self, command: UnloadModel) -> None:
        worker = self.workers[command.worker_id]
        assert not worker.leaving, "nothing is taken off a worker that leaves"
        if self._takes(worker, command.model, command.generation):
            held = worker.models[command.model]
            if held.state in (*AT_REST, "failed"):
                del worker.models[command.model]
            else:
                held.state, held.generation = "draining", command.generation

    def _load(self, command: LoadModel) -> None:
        worker = self.workers[command.worker_id]
        assert not worker.leaving, "nothing new goes to a worker that leaves"
        if not self._takes(worker, command.model, command.generation):
            return
        held = worker.models.get(command.model)
        if held is not None and held.state in ("loading", "ready"):
            held.generation = command.generation
        else:
            state = KNOWN if command.residency.tier is Tier.COLD else "loading"
            worker.models[command.model] = Held(state, command.generation, command.uri)

    def _takes(self, worker: Worker, name: str, generation: int) -> bool:
        newest = worker.newest.get(name, 0)
        if generation < newest:
            self.refused[name] = max(newest, self.refused.get(name, 0))
            return False
        worker.newest[name] = generation
        return True

    def _write_statuses(self, plan: ModelsPlan) -> None:
        workers = self.cluster_workers()
        for key, verdict in plan.verdicts.items():
            previous = self.statuses.get(key, ModelDeploymentStatus())
            facts = model_facts(verdict, workers, self.failed, {})
            generation = self.objects[key]["metadata"]["generation"]
            status = model_status(verdict, facts, previous, generation=generation, now_s=self.now_s)
            self.statuses[key] = ModelDeploymentStatus.model_validate(status.to_wire())


def revision_of(world: World, name: str, namespace: str = "default") -> str:
    """Registry name of the revision that an object's spec asks for."""
    from naru_operator.core.models.revision import revision_spec

    raw = world.objects[ObjectKey(namespace, name)]
    return names.revision_name(name, revision_spec(ModelDeployment.model_validate(raw).spec).digest)


def without_memory(world: World) -> ModelsSnapshot:
    """The snapshot of an operator that has just started."""
    return dataclasses.replace(world.snapshot(), applied={}, refused={}, failed={}, started_s={})


KEY = ObjectKey("default", "m")


def world_of(*, num_workers: int = 2, **spec: Any) -> World:
    """A world in which the first revision of `m` serves."""
    world = World(**{f"p_{index}": "p" for index in range(num_workers)})
    world.apply(raw_model("m", model={"uri": "pypi://one"}, **spec))
    world.settle()
    return world


def verdict(world: World) -> Verdict:
    return world.plan().verdicts[KEY]


def steps(world: World) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """One turn: (loads, unloads) as (worker, model)."""
    plan = world.turn()
    return (
        [(load.worker_id, load.model) for load in plan.load_models],
        [(unload.worker_id, unload.model) for unload in plan.unload_models],
    )
