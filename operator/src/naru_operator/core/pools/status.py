"""What is told of a pool: its `status`, out of the snapshot and the plan. Called by the controller after each plan.

The same facts give the same status, so that nothing is written while nothing happens: times stay as long as what they
date, and memory in use is told again only when it has moved by a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from naru_operator.core.pools.member_names import pool_selector
from naru_operator.core.pools.members import Member, Members, sort_members
from naru_operator.core.pools.model import PoolPlan, PoolSnapshot
from naru_operator.core.pools.plan import num_desired
from naru_operator.core.pools.storage import BOUND, slot_claims
from naru_operator.core.pools.template_hash import template_hash
from naru_proto.crd.metadata import Condition, ConditionStatus, ObjectError
from naru_proto.crd.units import timestamp_of
from naru_proto.crd.worker_pool import MAX_MEMBERS, PoolPhase, WorkerPoolStatus, WorkersStatus
from naru_proto.crd.worker_pool import Member as MemberStatus

USED_STEP_RATIO = 1 / 32
"""Of a worker's budget: memory in use must move by so much to be told again. KV caches breathe with each request."""
_RESIDENT = ("ready", "active", "draining")
_MAX_ERROR_LENGTH = 4096
_MAY_PASS = ("Unschedulable", "StorageNotReady")
"""Problems that may pass without a change of the pool: another node, a volume."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What phase and conditions are made of."""

    num_desired: int
    num_ready: int
    num_outdated: int
    num_living: int
    num_draining: int
    is_deleted: bool

    @property
    def is_complete(self) -> bool:
        """Whether all is as it was asked for."""
        is_exact = self.num_ready == self.num_desired == self.num_living
        return is_exact and not self.num_outdated and not self.is_deleted

    @property
    def counted(self) -> str:
        """For messages."""
        return f"{self.num_ready} of {self.num_desired} workers are ready"


def pool_status(
    snapshot: PoolSnapshot, plan: PoolPlan, previous: WorkerPoolStatus, *, now_s: float
) -> WorkerPoolStatus:
    """The pool's status now; equal to ``previous`` when nothing of note has changed. ``now_s`` is Unix seconds."""
    pool = snapshot.pool
    members = sort_members(snapshot, template_hash(pool, snapshot.settings), now_s=now_s)
    facts = _facts(snapshot, members)
    told = _member_statuses(members, previous)
    conditions = (
        _accepted(plan),
        _ready(facts, plan),
        _progressing(facts, plan),
        _storage_ready(snapshot, members, plan),
    )
    generation = pool.metadata.generation
    budget_bytes, used_bytes = _sum(m.budget_bytes for m in told), _sum(m.used_bytes for m in told)
    if len(told) > MAX_MEMBERS and used_bytes is not None:
        # What was told last is known of those in the list alone.
        used_bytes = _steady(used_bytes, previous.used_bytes, budget_bytes or 0)
    return WorkerPoolStatus(
        observedGeneration=generation,
        phase=_phase(facts, plan, previous),
        conditions=tuple(_dated(each, previous, generation, now_s) for each in conditions),
        workers=WorkersStatus(desired=facts.num_desired, ready=facts.num_ready, draining=facts.num_draining),
        selector=pool_selector(pool.metadata.name),
        budgetBytes=budget_bytes,
        usedBytes=used_bytes,
        members=tuple(told[:MAX_MEMBERS]),
        lastError=_last_error(facts, plan, previous, now_s),
    )


def _facts(snapshot: PoolSnapshot, members: Members) -> _Facts:
    return _Facts(
        num_desired=num_desired(snapshot.pool),
        num_ready=sum(member.is_ready for member in members.living),
        num_outdated=sum(member.is_outdated for member in members.living),
        num_living=len(members.living),
        num_draining=len(members.going),
        is_deleted=snapshot.pool.metadata.deletion_timestamp is not None,
    )


def _member_statuses(members: Members, previous: WorkerPoolStatus) -> list[MemberStatus]:
    used = {member.worker: member.used_bytes for member in previous.members}
    living = {member.name for member in members.living}
    both = sorted((*members.living, *members.going), key=lambda member: member.name)
    return [_member_status(m, used.get(m.name), is_going=m.name not in living) for m in both]


def _member_status(member: Member, told_bytes: int | None, *, is_going: bool) -> MemberStatus:
    worker = member.worker
    return MemberStatus(
        worker=member.name,
        node=member.pod.node,
        ready=member.is_ready,
        draining=is_going or member.is_leaving,
        budgetBytes=worker.budget_bytes if worker else None,
        usedBytes=_steady(worker.used_bytes, told_bytes, worker.budget_bytes) if worker else None,
        numModels=sum(held.state in _RESIDENT for held in worker.models.values()) if worker else 0,
    )


def _steady(used_bytes: int, told_bytes: int | None, budget_bytes: int) -> int:
    """What was told, as long as it is nearly true; nothing in use is told at once."""
    is_near = told_bytes and abs(used_bytes - told_bytes) < budget_bytes * USED_STEP_RATIO
    return told_bytes if is_near and used_bytes and told_bytes else used_bytes


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _phase(facts: _Facts, plan: PoolPlan, previous: WorkerPoolStatus) -> PoolPhase:
    if facts.is_deleted:
        return "Draining"
    if plan.is_accepted and facts.is_complete:
        return "Draining" if facts.num_desired == 0 and facts.num_draining else "Ready"
    if plan.problem_reason or not plan.is_accepted:
        return _troubled_phase(facts, plan)
    return _moving_phase(facts, previous)


def _troubled_phase(facts: _Facts, plan: PoolPlan) -> PoolPhase:
    if not plan.is_accepted:
        return "Failed"
    if facts.num_ready:
        return "Degraded"
    return "Pending" if plan.problem_reason in _MAY_PASS else "Failed"


def _moving_phase(facts: _Facts, previous: WorkerPoolStatus) -> PoolPhase:
    if facts.num_desired == 0:
        return "Draining"
    had_all = previous.phase in ("Ready", "Degraded") and previous.workers.desired == facts.num_desired
    if had_all and facts.num_ready < facts.num_desired and not facts.num_outdated:
        return "Degraded"
    return "Scaling" if facts.num_ready else "Pending"


_Undated = tuple[str, ConditionStatus, str, str]
"""Type, status, reason, message."""


def _accepted(plan: PoolPlan) -> _Undated:
    if plan.is_accepted:
        return "Accepted", "True", "Accepted", ""
    return "Accepted", "False", plan.problem_reason or "Refused", plan.problem


def _ready(facts: _Facts, plan: PoolPlan) -> _Undated:
    if facts.is_deleted:
        return "Ready", "False", "Deleted", "the pool is being deleted"
    if plan.is_accepted and facts.num_ready >= facts.num_desired:
        if facts.num_desired == 0:
            return "Ready", "True", "NoWorkersAsked", "workers.min is 0"
        return "Ready", "True", "WorkersReady", facts.counted
    message = f"{facts.counted}: {plan.problem}" if plan.problem else facts.counted
    return "Ready", "False", plan.problem_reason or "WorkersNotReady", message


def _progressing(facts: _Facts, plan: PoolPlan) -> _Undated:
    """As of Deployments: False only when it goes no further by itself."""
    if facts.is_deleted:
        return "Progressing", "True", "Deleted", "its workers leave"
    if plan.is_accepted and facts.is_complete:
        return "Progressing", "True", "RolloutComplete", "all workers are as the spec asks"
    if plan.problem_reason:
        return "Progressing", "False", plan.problem_reason, plan.problem
    if facts.num_outdated:
        message = f"{facts.num_outdated} workers are of an older revision; {facts.counted}"
        return "Progressing", "True", "RollingOut", message
    return "Progressing", "True", "Scaling", facts.counted


def _storage_ready(snapshot: PoolSnapshot, members: Members, plan: PoolPlan) -> _Undated:
    if plan.storage_problem:
        return "StorageReady", "False", "StorageNotReady", plan.storage_problem
    needed = {name for _, name in slot_claims(snapshot.pool, members.living)} | set(snapshot.pool.spec.claims)
    if not needed:
        return "StorageReady", "True", "NoClaims", ""
    unbound = sorted(name for name in needed if snapshot.claims.get(name) != BOUND)
    if unbound:
        return "StorageReady", "Unknown", "NotBoundYet", f"waiting for PersistentVolumeClaim {unbound[0]!r}"
    return "StorageReady", "True", "ClaimsBound", ""


def _dated(told: _Undated, previous: WorkerPoolStatus, generation: int | None, now_s: float) -> Condition:
    kind, status, reason, message = told
    before = next((each for each in previous.conditions if each.type == kind), None)
    is_same = before is not None and before.status == status
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        lastTransitionTime=before.last_transition_time if before and is_same else timestamp_of(now_s),
        observedGeneration=generation,
    )


def _last_error(facts: _Facts, plan: PoolPlan, previous: WorkerPoolStatus, now_s: float) -> ObjectError | None:
    before = previous.last_error
    if not plan.problem_reason:
        return None if facts.is_complete else before
    code = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plan.problem_reason).lower()
    message, worker = plan.problem[:_MAX_ERROR_LENGTH], plan.problem_worker or None
    if before and (before.code, before.message, before.worker) == (code, message, worker):
        return before
    return ObjectError(code=code, message=message, worker=worker, at=timestamp_of(now_s))
