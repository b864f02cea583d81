"""How a ModelDeployment comes from the revision that serves to the one its spec asks for. Pure.

Says which revisions workers should hold now and which one requests go to; placement, loads and records are the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_operator.core.models.fleet import Fleet
from naru_proto import names

COMPLETE = "RolloutComplete"
REVISION_FAILED = "RevisionFailed"
FAILED = (REVISION_FAILED, "DeadlineExceeded")


@dataclass(frozen=True, slots=True)
class Case:
    """One ModelDeployment's rollout, as it is seen."""

    model: str
    served: str
    """Digest of the revision that requests go to; empty: there is none yet."""
    update: str
    """Digest of the revision the spec asks for."""
    is_on_demand: bool
    is_recreate: bool
    """The old copies leave before new ones are loaded."""
    num_copies: int
    """Copies there should be; of no meaning on demand."""
    num_eligible: int
    """Workers that may hold the update."""
    deadline_s: float
    started_s: int | None
    """When the rollout to `update` began; None: it is done, or has not begun."""
    failed_message: str = ""
    """What the rollout to `update` failed with, as it was last told; empty: it had not failed."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What to do about it now."""

    target: str
    """Digest of the revision that requests should go to."""
    wanted: tuple[str, ...]
    """Digests of the revisions that workers should hold or know."""
    reason: str
    message: str
    has_failed: bool = False
    started_s: int | None = None
    """For the next case; None: it is done."""
    num_ahead: int = 0
    """Copies of the update that should be up now, ahead of requests, for the target to move."""


def decide(case: Case, fleet: Fleet, *, now_s: int) -> Rollout:
    """The next step of a rollout; deciding again from where it leads says the same."""
    if case.served in ("", case.update):
        return _settle(case, fleet, now_s)
    current, update = _name(case, case.served), _name(case, case.update)
    started_s = now_s if case.started_s is None else case.started_s
    num_current, num_update = fleet.num_ready(current), fleet.num_ready(update)
    is_held = fleet.is_held(current)
    if case.is_on_demand:
        is_idle = not any(each.is_up for each in fleet.copies(current))
    else:
        is_idle = case.is_recreate and not is_held and num_current == 0
    if is_idle or num_update >= max(1, num_current):
        return _settle(_moved(case, started_s), fleet, now_s)
    if case.is_recreate and not case.is_on_demand:
        wanted: tuple[str, ...] = () if is_held else (case.update,)
        if is_held:
            message = f"the copies of revision {case.served} leave first"
            return Rollout(case.served, wanted, "UnloadingCurrent", message, started_s=started_s)
    else:
        wanted = (case.served, case.update)
    needed = max(1, num_current)
    reason, message, has_failed = _progress(case, fleet, started_s, now_s, num_update, needed)
    if has_failed and message != case.failed_message:
        message = f"{message}; revision {case.served} goes on serving"
    return Rollout(case.served, wanted, reason, message, has_failed, started_s, 0 if has_failed else needed)


def _settle(case: Case, fleet: Fleet, now_s: int) -> Rollout:
    """Requests go to the update: what is left are its further copies."""
    target, num_ready = case.update, fleet.num_ready(_name(case, case.update))
    needed = max(1, min(case.num_copies, case.num_eligible))
    if case.started_s is None or case.is_on_demand or num_ready >= needed:
        return Rollout(target, (target,), COMPLETE, f"revision {target} serves")
    reason, message, has_failed = _progress(case, fleet, case.started_s, now_s, num_ready, needed)
    return Rollout(target, (target,), reason, message, has_failed, case.started_s)


def _progress(
    case: Case, fleet: Fleet, started_s: int, now_s: int, num_ready: int, needed: int
) -> tuple[str, str, bool]:
    """(reason, message, whether it has failed) of copies that are still missing."""
    failure = fleet.failure(_name(case, case.update))
    if failure:
        return REVISION_FAILED, f"revision {case.update} cannot be loaded: {failure}", True
    copies = f"{num_ready} of {needed} copies of revision {case.update} are ready"
    if case.failed_message and num_ready == 0:
        # Its worker tries again by itself: no news until a copy is ready, or the spec asks for something else.
        return REVISION_FAILED, case.failed_message, True
    if now_s - started_s >= case.deadline_s:
        return "DeadlineExceeded", f"{copies} after {case.deadline_s:g} s, the rollout's progressDeadline", True
    if case.num_eligible == 0:
        return "WaitingForWorkers", f"no worker takes revision {case.update} now", False
    return "WaitingForCopies", copies, False


def _moved(case: Case, started_s: int) -> Case:
    return Case(
        case.model,
        case.update,
        case.update,
        case.is_on_demand,
        case.is_recreate,
        case.num_copies,
        case.num_eligible,
        case.deadline_s,
        started_s,
        case.failed_message,
    )


def _name(case: Case, digest: str) -> str:
    return names.revision_name(case.model, digest)
