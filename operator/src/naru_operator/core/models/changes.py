"""What is new between two statuses of a ModelDeployment: whether it can wait, and what is worth an event. Pure.

Called by the controller before it writes a status.
"""

from __future__ import annotations

from collections.abc import Iterable

from naru_operator.core.kube import ObjectEvent, ObjectKey
from naru_operator.core.models.claims import ALIAS_WAITS
from naru_operator.core.models.rollout import FAILED
from naru_proto.crd.metadata import Condition
from naru_proto.crd.model_status import ModelDeploymentStatus

_KIND = "ModelDeployment"


def is_progress_only(previous: ModelDeploymentStatus, new: ModelDeploymentStatus) -> bool:
    """Whether they differ, and in a load's progress, requests in flight, KV bytes and last uses alone."""
    return previous != new and _settled(previous) == _settled(new)


def model_events(
    key: ObjectKey, previous: ModelDeploymentStatus, new: ModelDeploymentStatus
) -> tuple[ObjectEvent, ...]:
    """What is worth telling of the step from one status to the next, in the order it happened."""
    return tuple(
        ObjectEvent(_KIND, key, reason, message, is_warning)
        for reason, message, is_warning in (
            *_acceptance(previous, new),
            *_rollout(previous, new),
            *_copies(previous, new),
        )
    )


def _acceptance(previous: ModelDeploymentStatus, new: ModelDeploymentStatus) -> Iterable[tuple[str, str, bool]]:
    before, now = _condition(previous, "Accepted"), _condition(new, "Accepted")
    if now is None:
        return
    if now.status == "True" and (before is None or before.status != "True"):
        yield "Accepted", now.message, False
    waited, waits = (each is not None and each.reason == ALIAS_WAITS for each in (before, now))
    if waits and not waited:
        yield ALIAS_WAITS, now.message, False
    if waited and not waits and now.status == "True":
        yield "AliasMoved", "requests for its alias come here", False
    if now.status == "False" and (before is None or (before.status, before.reason) != (now.status, now.reason)):
        yield now.reason, now.message, True


def _rollout(previous: ModelDeploymentStatus, new: ModelDeploymentStatus) -> Iterable[tuple[str, str, bool]]:
    before, now = _condition(previous, "Progressing"), _condition(new, "Progressing")
    update, old_update = new.update_revision, previous.update_revision
    current, old_current = new.current_revision, previous.current_revision
    is_new = update is not None and update != old_update and not _has_status(_condition(new, "Accepted"), "False")
    if is_new and old_current is not None and update != old_current:
        yield "RolloutStarted", f"revision {old_current} serves, revision {update} is on its way", False
    if old_current is not None and current is not None and current != old_current:
        yield "RolloutComplete", f"requests go to revision {current}, not to {old_current} any more", False
    if now is not None and now.reason in FAILED:
        if is_new or before is None or before.reason != now.reason:
            yield "RolloutFailed", now.message, True


def _copies(previous: ModelDeploymentStatus, new: ModelDeploymentStatus) -> Iterable[tuple[str, str, bool]]:
    loaded, was_loaded = _condition(new, "Loaded"), _condition(previous, "Loaded")
    error, eviction = new.last_error, new.last_eviction
    is_refused = _has_status(_condition(new, "Accepted"), "False")
    if error is not None and error != previous.last_error and not is_refused:
        yield "LoadFailed", f"{error.worker}: {error.message}" if error.worker else error.message, True
    if loaded is not None and loaded.status == "True" and not _has_status(was_loaded, "True"):
        yield "Loaded", loaded.message, False
    if eviction is not None and eviction != previous.last_eviction:
        by = f" for {eviction.by!r}" if eviction.by else ""
        yield "Evicted", f"it left worker {eviction.worker!r} ({eviction.reason}{by})", False


def _settled(status: ModelDeploymentStatus) -> ModelDeploymentStatus:
    """Without what moves all the time."""
    load = status.load
    return status.model_copy(
        update={
            "load": None if load is None else load.model_copy(update={"bytes_done": 0, "eta_seconds": None}),
            "last_used": None,
            "residents": tuple(
                each.model_copy(update={"in_flight": 0, "kv_bytes": None, "last_used": None})
                for each in status.residents
            ),
        }
    )


def _condition(status: ModelDeploymentStatus, kind: str) -> Condition | None:
    return next((each for each in status.conditions if each.type == kind), None)


def _has_status(condition: Condition | None, status: str) -> bool:
    return condition is not None and condition.status == status
