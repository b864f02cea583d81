"""What to do next for one WorkerPool: `plan_pool(snapshot)` compares pods and spec and gives the steps with reasons.

Called by the controller, which carries the steps out and calls again with what it then sees. What the API server
answers to a step must be seen at the next call, or a second pod goes where one should. Planning twice from the state
that a plan leads to gives no steps.

Terms: `desired` workers are asked for. A pod is outdated when its template hash is not the spec's. A pod serves when it
is ready; an outdated one without a lease also serves while no lease at all is seen, as the registry may be away.
"""

from __future__ import annotations

from collections.abc import Iterable

from naru_operator.core.kube import Object
from naru_operator.core.pools.member_names import member_name
from naru_operator.core.pools.members import Member, Members, sort_members
from naru_operator.core.pools.model import ObservedPod, PodToDelete, PoolPlan, PoolSnapshot
from naru_operator.core.pools.pod_manifest import pool_objects, slot_claim, template_hash, worker_pod
from naru_operator.core.pools.storage import find_storage_problem, slot_claims
from naru_operator.core.pools.troubles import find_problem, find_stuck
from naru_proto.crd.v1alpha1 import WorkerPool

MAX_CREATES = 50
"""Pods of one turn: a thousand at once would hold up the API server for everybody."""


def plan_pool(snapshot: PoolSnapshot, *, now_s: float) -> PoolPlan:
    """The steps for one pool; ``now_s`` is Unix seconds, for ages of pods."""
    pool = snapshot.pool
    if pool.metadata.deletion_timestamp is not None:
        # Its pods go by their owner. A new one would come after the garbage collector has looked.
        return PoolPlan(reasons=("nothing: the pool is being deleted",))
    members = sort_members(snapshot, template_hash(pool, snapshot.settings), now_s=now_s)
    stuck = find_stuck(snapshot, members.living, now_s=now_s)
    steps = _Steps(snapshot, members, is_stuck=stuck is not None)
    steps.choose()
    storage_problem = find_storage_problem(snapshot, members.living, now_s=now_s)
    problem = find_problem(snapshot, members, stuck, storage_problem, now_s=now_s)
    return PoolPlan(
        apply=(*pool_objects(pool, snapshot.raw, snapshot.settings), *_missing_claims(snapshot, members, steps.slots)),
        create=tuple(worker_pod(pool, snapshot.raw, slot, snapshot.settings) for slot in steps.slots),
        delete=tuple(steps.deletes),
        reasons=tuple(steps.reasons),
        problem_reason=problem.reason,
        problem=problem.text,
        problem_worker=problem.worker,
        storage_problem=storage_problem,
    )


def num_desired(pool: WorkerPool) -> int:
    """Workers there should be, the surge of a rollout aside."""
    workers = pool.spec.workers
    return workers.min if workers.max is None else min(workers.min, workers.max)


class _Steps:
    """The choice of one turn, step by step: who goes, then who comes."""

    def __init__(self, snapshot: PoolSnapshot, members: Members, *, is_stuck: bool) -> None:
        self._pool = snapshot.pool
        self._members = members
        self._is_stuck = is_stuck
        self._desired = num_desired(snapshot.pool)
        self._max_surge = snapshot.pool.spec.rollout.max_surge
        self._staying = sorted(members.living, key=_worth)
        """Least worth first."""
        self.deletes: list[PodToDelete] = []
        self.slots: list[int] = []
        """Of the pods to create."""
        self.reasons: list[str] = []

    def choose(self) -> None:
        """Fills the lists."""
        for pod in self._members.finished:
            self._delete_pod(pod, f"it has ended ({pod.trouble_reason or 'it succeeded'})")
        for member in self._members.going:
            if not member.pod.is_terminating:
                self._delete_pod(member.pod, "its worker has been told to end")
        if not self._is_stuck:
            for member in [m for m in self._staying if m.is_outdated and not self._serves(m)]:
                self._delete(member, "it is outdated and not ready")
        self._delete_surplus()
        self._roll()
        self._create()

    def _delete_surplus(self) -> None:
        room = self._desired + (self._max_surge if any(m.is_outdated for m in self._staying) else 0)
        for member in self._staying[: max(0, len(self._staying) - room)]:
            self._delete(member, f"{self._desired} workers are asked for")

    def _roll(self) -> None:
        """Outdated pods go as far as enough others serve; without a surge, one fewer is enough."""
        outdated = [member for member in self._staying if member.is_outdated]
        if not outdated:
            return
        if self._is_stuck:
            self.reasons.append(f"keep {len(outdated)} outdated pods: the rollout is stuck")
            return
        num_serving = sum(self._serves(member) for member in self._staying)
        num_spare = num_serving - max(0, self._desired - (self._max_surge == 0))
        for member in outdated[: max(0, num_spare)]:
            self._delete(member, "it is outdated, and enough others are ready")
        num_kept = len(outdated) - max(0, num_spare)
        if num_kept > 0:
            self.reasons.append(f"keep {num_kept} outdated pods until their successors are ready")

    def _create(self) -> None:
        num_outdated = sum(member.is_outdated for member in self._staying)
        surge = 0 if self._is_stuck else min(self._max_surge, num_outdated)
        num_missing = self._desired + surge - len(self._staying) - len(self._members.resting)
        for pod in self._members.resting:
            self.reasons.append(f"wait before pod {pod.key.name!r} is replaced: it failed at once")
        slot = 0
        while len(self.slots) < min(num_missing, MAX_CREATES):
            name = member_name(self._pool.metadata.name, slot)
            if name not in self._members.taken_names:
                self.slots.append(slot)
                what = f"{self._desired} workers are asked for" if not surge else "an outdated one is to be replaced"
                self.reasons.append(f"create pod {name!r}: {what}")
            slot += 1
        if num_missing > MAX_CREATES:
            self.reasons.append(f"create {num_missing - MAX_CREATES} more pods later: {MAX_CREATES} in one turn")

    def _serves(self, member: Member) -> bool:
        is_unseen = member.is_outdated and member.worker is None and not self._members.has_registry
        return member.is_ready or (is_unseen and member.pod.is_ready)

    def _delete(self, member: Member, reason: str) -> None:
        self._staying = [other for other in self._staying if other is not member]
        self._delete_pod(member.pod, reason)

    def _delete_pod(self, pod: ObservedPod, reason: str) -> None:
        self.deletes.append(PodToDelete(pod.key, pod.uid, reason))
        self.reasons.append(f"delete pod {pod.key.name!r}: {reason}")


def _worth(member: Member) -> tuple[bool, bool, bool, int, int, int]:
    """Who goes first: not ready, then outdated, then the idlest, then least in memory, then the youngest."""
    worker = member.worker
    return (
        member.is_ready,
        member.pod.is_ready,
        not member.is_outdated,
        worker.num_running + worker.num_waiting if worker else 0,
        worker.used_bytes if worker else 0,
        -(member.pod.slot or 0),
    )


def _missing_claims(snapshot: PoolSnapshot, members: Members, slots: Iterable[int]) -> list[Object]:
    """One that exists is left alone: its class can never be changed, nor its size made smaller."""
    used = {member.pod.slot for member, _ in slot_claims(snapshot.pool, members.living)} | set(slots)
    claims = (
        slot_claim(snapshot.pool, snapshot.raw, slot) for slot in sorted(slot for slot in used if slot is not None)
    )
    return [claim for claim in claims if claim is not None and claim["metadata"]["name"] not in snapshot.claims]
