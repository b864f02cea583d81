"""Carries out the plans of WorkerPools: applies, creates, deletes, and remembers what the store may not show yet.

Called by the pools' control. Decides nothing about pools; only that what was refused is not tried again at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass

from naru_operator.adapters.cluster.event_sender import EventSender
from naru_operator.adapters.cluster.side_by_side import take_all
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import AlreadyExists, ApiAway, NotFound
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import Object, ObjectEvent, ObjectKey, key_of
from naru_operator.core.pools.model import PodToDelete, PoolPlan
from naru_proto import names

_log = logging.getLogger(__name__)

KIND = "WorkerPool"
_TAKEN_S = 60.0
"""A foreign pod's name is believed to be taken for so long; then it is tried again."""
_MAX_STEPS = 12
"""Pods of one pool that are created or deleted at once."""
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 64.0
"""Before pods of a pool are created again after the API server refused one; doubled with each refusal in a row."""

_Applied = tuple[str, ObjectKey]
"""Kind and key."""


@dataclass(frozen=True, slots=True)
class StepTrouble:
    """What the API server refused of a pool's plan."""

    reason: str
    """One CamelCase word."""
    text: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of several steps."""

    troubles: tuple[StepTrouble, ...] = ()
    """In the order of the steps."""
    away: ApiAway | None = None
    """One of them had no answer."""
    num_failed: int = 0


@dataclass(slots=True)
class _Memory:
    """What is remembered of one pool."""

    applied: dict[_Applied, str]
    """Digest of what was applied last."""
    said: tuple[str, ...] = ()
    """What was last logged of its plan: what is put off is put off at every turn."""
    generation: object = None
    """Of the pool, when pods of it were last refused: an edited pool is tried at once."""
    num_refusals: int = 0
    """In a row."""
    refused: StepTrouble | None = None
    retry_s: float = 0.0
    """Monotonic time before which no pod is created."""


class PoolSteps:
    """What was done for each pool. asyncio thread only."""

    def __init__(self, store: ObjectStore, client: KubeClient, events: EventSender) -> None:
        self._store, self._client, self._events = store, client, events
        self._pools: dict[tuple[ObjectKey, str], _Memory] = {}
        """By key and uid."""
        self._taken: dict[ObjectKey, float] = {}
        """Names that pods without our label have, and when that was seen."""
        self._deleted: set[str] = set()
        """Uids of pods that were told to go: the store may not show it yet."""

    def keep_only(self, pools: Collection[tuple[ObjectKey, str]], pod_uids: Collection[str]) -> None:
        """Forgets pools (key and uid) and pods that are gone, and names that may be free again."""
        self._pools = {pool: memory for pool, memory in self._pools.items() if pool in pools}
        self._deleted.intersection_update(pod_uids)
        now_s = time.monotonic()
        self._taken = {key: at_s for key, at_s in self._taken.items() if now_s - at_s < _TAKEN_S}

    def forget_applied(self) -> None:
        """Everything is applied anew at the next turn: another hand may have changed it."""
        for memory in self._pools.values():
            memory.applied.clear()

    def is_deleted(self, uid: str) -> bool:
        """Whether a pod was told to go."""
        return uid in self._deleted

    def taken_names(self, namespace: str) -> frozenset[str]:
        """Names that pods have which are none of ours."""
        return frozenset(key.name for key in self._taken if key.namespace == namespace)

    async def carry_out(self, raw: Object, plan: PoolPlan, *, may_delete: bool) -> StepTrouble | None:
        """Takes the plan's steps; one that is refused stands in no other's way. Returns the first refusal.

        ``may_delete`` False: pods that live are left alone, and so is what would take their places.

        Raises:
            NotLeader, ApiAway: nothing further will succeed now.
        """
        pool = key_of(raw)
        uid = str(raw["metadata"].get("uid", ""))
        memory = self._pools.setdefault((pool, uid), _Memory({}))
        deletes = plan.delete if may_delete else ()
        creates = plan.create if may_delete or not plan.delete else ()
        if plan.reasons != memory.said and len(deletes) == len(plan.delete):
            memory.said = plan.reasons
            for reason in plan.reasons:
                _log.info("WorkerPool %s: %s", pool, reason)
        wanted = {_slot(item) for item in plan.apply}
        memory.applied = {slot: digest for slot, digest in memory.applied.items() if slot in wanted}
        # Who goes goes first: there must never be more pods than the plan means. Who stays keeps a new one out.
        deleted = await _each("FailedDelete", (self._delete(raw, pod) for pod in deletes))
        applied = await _each("FailedApply", (self._apply(memory, item) for item in plan.apply))
        creates = creates[: len(creates) - deleted.num_failed] if deleted.num_failed < len(creates) else ()
        outcomes = (applied, await self._create_pods(raw, memory, creates), deleted)
        for outcome in outcomes:
            if outcome.away is not None:
                raise outcome.away
        return next((trouble for outcome in outcomes for trouble in outcome.troubles), None)

    async def _create_pods(self, raw: Object, memory: _Memory, pods: Collection[Object]) -> _Outcome:
        generation = raw["metadata"].get("generation")
        if not pods:
            return _Outcome()
        is_resting = memory.generation == generation and time.monotonic() < memory.retry_s
        if is_resting and memory.refused is not None:
            return _Outcome((memory.refused,))
        outcome = await _each("FailedCreate", (self._create(raw, pod) for pod in pods))
        if not outcome.troubles:
            memory.num_refusals, memory.refused = 0, None
            return outcome
        memory.num_refusals = memory.num_refusals + 1 if memory.generation == generation else 1
        pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(memory.num_refusals - 1, 16))
        first = outcome.troubles[0]
        memory.generation, memory.refused, memory.retry_s = generation, first, time.monotonic() + pause_s
        self._events.send(ObjectEvent(KIND, key_of(raw), first.reason, first.text, is_warning=True), raw)
        return outcome

    async def _create(self, raw: Object, pod: Object) -> None:
        key = key_of(raw)
        try:
            self._store.take("Pod", await self._client.create(pod))
        except AlreadyExists:
            await self._look_at(ObjectKey(key.namespace, pod["metadata"]["name"]))
            return
        message = f"created pod {pod['metadata']['name']!r}"
        self._events.send(ObjectEvent(KIND, key, "WorkerCreated", message), raw)

    async def _look_at(self, key: ObjectKey) -> None:
        """A pod of that name exists: the store has not seen it yet, or it is none of ours and never will be there."""
        try:
            found = await self._client.get("Pod", key)
        except NotFound:
            return  # gone meanwhile: the next turn tries again
        if (found["metadata"].get("labels") or {}).get(names.LABEL_MANAGED_BY) == names.MANAGED_BY:
            self._store.take("Pod", found)
        else:
            self._taken[key] = time.monotonic()

    async def _delete(self, raw: Object, pod: PodToDelete) -> None:
        self._deleted.add(pod.uid)
        try:
            await self._client.delete("Pod", pod.key, uid=pod.uid)
        except BaseException:
            self._deleted.discard(pod.uid)  # it may be there still: it counts until a deletion is answered
            raise
        message = f"worker {pod.key.name!r} leaves: {pod.reason}"
        self._events.send(ObjectEvent(KIND, key_of(raw), "WorkerLeaves", message), raw)

    async def _apply(self, memory: _Memory, item: Object) -> None:
        slot = _slot(item)
        digest = hashlib.blake2b(json.dumps(item, sort_keys=True).encode(), digest_size=16).hexdigest()
        if memory.applied.get(slot) != digest:
            await self._client.apply(item)
            memory.applied[slot] = digest


def _slot(item: Mapping[str, object]) -> _Applied:
    return str(item["kind"]), key_of(dict(item))


async def _each(reason: str, steps: Iterable[Awaitable[None]]) -> _Outcome:
    """Takes all steps.

    Raises:
        NotLeader: this replica may not act any more.
    """
    errors = await take_all(steps, _MAX_STEPS)
    away = next((error for error in errors if isinstance(error, ApiAway)), None)
    refusals = (error for error in errors if not isinstance(error, ApiAway))
    return _Outcome(tuple(StepTrouble(reason, error.message) for error in refusals), away, len(errors))
