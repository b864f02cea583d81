"""Why a pool does not come to what is asked, out of what its pods tell. Called by the plan; does nothing about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naru_operator.core.pools.member_names import member_name
from naru_operator.core.pools.members import Member, Members
from naru_operator.core.pools.model import ObservedPod, PoolSnapshot
from naru_operator.core.pools.observe import CREATING
from naru_proto.crd.units import format_duration

HOPELESS_S = 300.0
"""What is here for so long will not heal without a change."""
_HOPELESS = frozenset(
    ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError",
     "RunContainerError", "CrashLoopBackOff", "OOMKilled")
)  # fmt: skip
_CREATING_PATIENCE_S = 60.0
_LEASE_PATIENCE_S = 60.0
_START_PATIENCE_S = 180.0

_REMEDIES = {
    "Unschedulable": "add nodes that fit, or lower what the pool's accelerator and template.resources ask for",
    "ImagePullBackOff": "correct spec.image, or name a Secret in template.imagePullSecrets that may pull it",
    "InvalidImageName": "correct spec.image",
    "CreateContainerConfigError": "create what it names, or correct template.env",
    "Evicted": "give the workers more room by template.resources, or bound cache.size",
    CREATING: "look at the pod's events",
}


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """As PoolPlan tells it."""

    reason: str = ""
    text: str = ""
    worker: str = ""


def find_stuck(snapshot: PoolSnapshot, members: Iterable[Member], *, now_s: float) -> Member | None:
    """The first worker of the new revision that has had its time; None: none, or there is no rollout."""
    members = tuple(members)
    if not any(member.is_outdated for member in members):
        return None
    deadline_s = snapshot.pool.spec.rollout.progress_deadline_s
    for member in members:
        if member.is_outdated or member.is_ready:
            continue
        is_hopeless = member.pod.trouble_reason in _HOPELESS
        if now_s - member.unready_since_s >= (min(deadline_s, HOPELESS_S) if is_hopeless else deadline_s):
            return member
    return None


def find_problem(
    snapshot: PoolSnapshot, members: Members, stuck: Member | None, storage_problem: str, *, now_s: float
) -> PoolProblem:
    """The one that explains most; empty: the pool is fine or on its way."""
    if stuck is not None:
        return _rollout_stuck(snapshot, stuck)
    if storage_problem:
        return PoolProblem("StorageNotReady", storage_problem)
    troubled = [(member.name, _trouble(member, snapshot, now_s)) for member in members.living]
    troubled += [(pod.key.name, _pod_trouble(pod)) for pod in (*members.resting, *members.finished)]
    told = [(name, trouble) for name, trouble in troubled if trouble[0] and not _is_expected(trouble[0], members)]
    if told:
        name, (reason, text) = told[0]
        others = f" ({len(told) - 1} more have trouble, too)" if len(told) > 1 else ""
        remedy = f"; {_REMEDIES[reason]}" if reason in _REMEDIES else ""
        return PoolProblem(reason, f"pod {name!r}: {text}{remedy}{others}", name)
    return _name_conflict(snapshot, members)


def _rollout_stuck(snapshot: PoolSnapshot, stuck: Member) -> PoolProblem:
    rollout = snapshot.pool.spec.rollout
    why = f"{stuck.pod.trouble_reason}: {stuck.pod.trouble}" if stuck.pod.trouble else _silence(stuck, snapshot)
    remedy = "correct the pool's spec or take its last change back"
    if stuck.pod.trouble_reason == "Unschedulable" and rollout.max_surge:
        remedy += ", or set rollout.maxSurge: 0 where there is no room for one more worker"
    after = format_duration(rollout.progress_deadline_s)
    text = f"new worker {stuck.name!r} did not become ready (deadline {after}): {why}; the old workers stay; {remedy}"
    return PoolProblem("RolloutStuck", text, stuck.name)


def _trouble(member: Member, snapshot: PoolSnapshot, now_s: float) -> tuple[str, str]:
    if member.is_ready:
        return "", ""
    pod, waited_s = member.pod, now_s - member.unready_since_s
    if pod.is_ready:
        is_silent = member.worker is None and waited_s >= _LEASE_PATIENCE_S
        return ("NotRegistered", _silence(member, snapshot)) if is_silent else ("", "")
    if pod.trouble_reason == CREATING and waited_s < _CREATING_PATIENCE_S:
        return "", ""
    if not pod.trouble_reason and waited_s >= _START_PATIENCE_S:
        return "NotReady", _silence(member, snapshot)
    return _pod_trouble(pod)


def _pod_trouble(pod: ObservedPod) -> tuple[str, str]:
    return pod.trouble_reason, pod.trouble


def _silence(member: Member, snapshot: PoolSnapshot) -> str:
    if member.pod.is_ready:
        secret = snapshot.settings.redis_secret
        return f"it runs and is not in the route map; check Secret {secret!r} (key url) and that Redis answers"
    return "it runs and does not answer its probes; its log says more"


def _is_expected(reason: str, members: Members) -> bool:
    """A successor waits for the room of its predecessor, which still drains."""
    return reason == "Unschedulable" and bool(members.going)


def _name_conflict(snapshot: PoolSnapshot, members: Members) -> PoolProblem:
    pool = snapshot.pool.metadata.name
    for name in members.foreign:
        slot = name.rpartition("-")[2]
        if slot.isascii() and slot.isdigit() and len(slot) < 9 and member_name(pool, int(slot)) == name:
            text = f"pod {name!r} belongs to something else; it stays, and its slot is not used: delete or rename it"
            return PoolProblem("NameConflict", text, name)
    return PoolProblem()
