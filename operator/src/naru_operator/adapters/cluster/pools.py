"""One turn for the WorkerPools: observe, plan, have it carried out, tell. Called by the term."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from naru_operator.adapters.cluster.event_sender import EventSender
from naru_operator.adapters.cluster.objects import Parsed, ParsedObjects
from naru_operator.adapters.cluster.pool_steps import KIND, PoolSteps, StepTrouble
from naru_operator.adapters.cluster.side_by_side import take_all
from naru_operator.adapters.cluster.status_writer import StatusWriter
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.pools.model import ObservedPod, PodSettings, PoolPlan, PoolSnapshot
from naru_operator.core.pools.observe import observe_pod
from naru_operator.core.pools.plan import plan_pool
from naru_operator.core.pools.pool_conflicts import find_pool_conflicts, refused_plan
from naru_operator.core.pools.status import pool_status
from naru_proto.crd.metadata import ObjectMeta
from naru_proto.crd.units import timestamp_of, unix_s_of
from naru_proto.crd.v1alpha1 import WorkerPool, WorkerPoolStatus
from naru_proto.crd.worker_pool import WorkerPoolSpec
from naru_proto.registry import WorkerRecord

_log = logging.getLogger(__name__)

_MAX_PROBLEM = 2000
"""Characters of a problem that a status takes."""
_MAX_POOLS = 8
"""Whose steps are taken at once."""
_CLAIM = "PersistentVolumeClaim"

ParsedPool = Parsed[WorkerPool, WorkerPoolStatus]


@dataclass(frozen=True, slots=True)
class _Observed:
    version: str
    pod: ObservedPod


class PoolControl:
    """Carries out what is planned for each pool. asyncio thread only."""

    def __init__(
        self,
        store: ObjectStore,
        client: KubeClient,
        statuses: StatusWriter,
        events: EventSender,
        settings: PodSettings,
    ) -> None:
        self._store, self._statuses, self._settings = store, statuses, settings
        self._steps = PoolSteps(store, client, events)
        self._objects: ParsedObjects[WorkerPool, WorkerPoolStatus] = ParsedObjects(WorkerPool, WorkerPoolStatus)
        self._observed: dict[ObjectKey, _Observed] = {}
        self._pods: dict[ObjectKey, list[ObservedPod]] = {}
        """The pods of each pool."""
        self._claims: dict[str, dict[str, str]] = {}
        """Namespace to its claims' phases."""
        self._said: dict[ObjectKey, str] = {}
        """What was last refused to each pool."""
        self.pools: dict[ObjectKey, ParsedPool] = {}
        self.is_moving = False
        """Whether some pool is not yet what it should be: worth another look soon."""

    async def observe(self) -> None:
        """Takes the store's pools, pods and claims."""
        self.pools = await self._objects.update(self._store.objects(KIND))
        self._statuses.keep_only(KIND, set(self.pools))
        self._said = {key: said for key, said in self._said.items() if key in self.pools}
        self._observe_pods()
        self._steps.keep_only(
            {(key, it.version[0]) for key, it in self.pools.items()},
            {it.pod.uid for it in self._observed.values()},
        )
        self._claims = {}
        for key, raw in self._store.objects(_CLAIM).items():
            phase = str((raw.get("status") or {}).get("phase", "Pending"))
            self._claims.setdefault(key.namespace, {})[key.name] = phase

    def forget(self) -> None:
        """Applies everything anew at the next turn: another hand may have changed it."""
        self._steps.forget_applied()

    def has_silent_pod(self, workers: Mapping[str, WorkerRecord]) -> bool:
        """Whether a pod is ready whose worker has no lease: the route map may not show all yet."""
        return any(
            it.pod.is_ready and not it.pod.is_terminating and key.name not in workers
            for key, it in self._observed.items()
        )

    async def turn(
        self, workers: Mapping[str, WorkerRecord], *, now_s: float, may_delete: bool, may_tell: bool
    ) -> None:
        """One turn over all pools, side by side: one that fails or hangs stands in no other's way.

        ``may_delete`` False: the leases are not certain, and who is idle is unknown. ``may_tell`` False: there are no
        leases at all to tell the state of a pool from, so only pools of which nothing was ever told are told of.

        Raises:
            NotLeader: this replica may not act any more.
            ApiAway: some pool's steps had no answer.
        """
        self.is_moving = False
        conflicts = find_pool_conflicts(it.model or _nameless(it.raw) for it in self.pools.values())
        turns = [
            self._turn(key, it, workers, conflicts.get(key, ""), now_s=now_s, may_delete=may_delete, may_tell=may_tell)
            for key, it in sorted(self.pools.items())
            if not it.raw["metadata"].get("deletionTimestamp")  # its pods go by their owner references
        ]
        failures = await take_all(turns, _MAX_POOLS)
        if failures:
            raise failures[0]

    async def _turn(
        self,
        key: ObjectKey,
        parsed: ParsedPool,
        workers: Mapping[str, WorkerRecord],
        conflict: str,
        *,
        now_s: float,
        may_delete: bool,
        may_tell: bool,
    ) -> None:
        snapshot = self._snapshot(key, parsed, workers)
        if parsed.model is None:
            plan = refused_plan("InvalidSpec", parsed.problem[:_MAX_PROBLEM])
        else:
            plan = refused_plan("NameConflict", conflict) if conflict else plan_pool(snapshot, now_s=now_s)
        trouble: StepTrouble | None = None
        try:
            trouble = await self._steps.carry_out(parsed.raw, plan, may_delete=may_delete)
        finally:
            if plan.create or plan.delete or trouble is not None:
                self.is_moving = True
            self._say(key, trouble)
            if may_tell or not parsed.status.conditions:
                self._tell(key, parsed, snapshot, _with_trouble(plan, trouble), now_s)

    def _snapshot(self, key: ObjectKey, parsed: ParsedPool, workers: Mapping[str, WorkerRecord]) -> PoolSnapshot:
        return PoolSnapshot(
            pool=parsed.model or _nameless(parsed.raw),
            raw=parsed.raw,
            pods=tuple(self._pods.get(key, ())),
            workers=workers,
            claims=self._claims.get(key.namespace, {}),
            settings=self._settings,
            taken_names=self._steps.taken_names(key.namespace),
        )

    def _say(self, key: ObjectKey, trouble: StepTrouble | None) -> None:
        text = trouble.text if trouble is not None else ""
        if text and text != self._said.get(key):
            _log.warning("WorkerPool %s: %s", key, text)
        self._said[key] = text

    def _tell(self, key: ObjectKey, parsed: ParsedPool, snapshot: PoolSnapshot, plan: PoolPlan, now_s: float) -> None:
        previous = self._statuses.last(KIND, key, parsed.version[0], parsed.status)
        assert isinstance(previous, WorkerPoolStatus)
        status = pool_status(snapshot, plan, previous, now_s=now_s)
        if status.phase != "Ready":
            self.is_moving = True
        if status != previous:
            self._statuses.tell(KIND, key, parsed.raw, status, is_progress_only=False)

    def _observe_pods(self) -> None:
        seen: dict[ObjectKey, _Observed] = {}
        pods: dict[ObjectKey, list[ObservedPod]] = {}
        for key, raw in sorted(self._store.objects("Pod").items()):
            version = str(raw["metadata"].get("resourceVersion", ""))
            before = self._observed.get(key)
            it = before if before and before.version == version else _Observed(version, observe_pod(raw))
            seen[key] = it
            is_going = it.pod.is_terminating or self._steps.is_deleted(it.pod.uid)
            pod = replace(it.pod, is_terminating=True) if is_going else it.pod
            pods.setdefault(ObjectKey(key.namespace, pod.pool), []).append(pod)
        self._observed, self._pods = seen, pods


def _with_trouble(plan: PoolPlan, trouble: StepTrouble | None) -> PoolPlan:
    """What was refused is the pool's problem, unless the plan knows a nearer one."""
    if trouble is None or plan.problem_reason:
        return plan
    return replace(plan, problem_reason=trouble.reason, problem=trouble.text[:_MAX_PROBLEM])


def _nameless(raw: Object) -> WorkerPool:
    """Stands for a pool whose spec nobody can read, so that its status can say so; its workers stay as they are."""
    meta = raw["metadata"]
    metadata = ObjectMeta.model_construct(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta.get("uid"),
        generation=meta.get("generation"),
        creation_timestamp=_moment(meta.get("creationTimestamp")),
    )
    return WorkerPool.model_construct(metadata=metadata, spec=WorkerPoolSpec())


def _moment(text: object) -> Any:
    try:
        return timestamp_of(unix_s_of(text))
    except (ValueError, OverflowError):
        return None
