"""A worker's pod as its JSON shows it: what the plan needs to know. Called by the controller for each pod it hears of.

The JSON may have any shape: a field that is absent or of another type counts as unset. Decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.pools.member_names import pool_label
from naru_operator.core.pools.model import ObservedPod
from naru_proto import names
from naru_proto.crd.units import unix_s_of

CONTAINER = "worker"
"""Name of the container the worker runs in."""
CREATING = "ContainerCreating"
"""Trouble only when it lasts: volumes are mounted and the network is set up meanwhile."""

_MAX_MESSAGE_LENGTH = 1000
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable")
_PULL_PREFIX = re.compile(r"^Back-off pulling image \"[^\"]*\"(: ErrImagePull)?:?\s*")
_SLOT = re.compile(r"[0-9]{1,8}")
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f]+")

Trouble = tuple[str, str]
"""Why a pod is not ready: CamelCase word and sentence; both empty where it only starts."""
_NONE: Trouble = ("", "")


def observe_pod(raw: Object) -> ObservedPod:
    """What `raw` says; whether the pod is a pool's own is for the plan to decide."""
    metadata, spec, status = _mapping(raw, "metadata"), _mapping(raw, "spec"), _mapping(raw, "status")
    labels = _mapping(metadata, "labels")
    readiness = _condition(status, "Ready")
    is_ready = readiness.get("status") == "True"
    trouble_reason, trouble = _NONE if is_ready else _trouble(status)
    slot = _text(labels, names.LABEL_SLOT)
    return ObservedPod(
        key=ObjectKey(_text(metadata, "namespace"), _text(metadata, "name")),
        uid=_text(metadata, "uid"),
        pool=_pool(labels, _mapping(metadata, "annotations")),
        slot=int(slot) if _SLOT.fullmatch(slot) else None,
        template_hash=_text(labels, names.LABEL_TEMPLATE_HASH),
        node=_text(spec, "nodeName") or None,
        owner_uid=_owner_uid(metadata),
        is_ready=is_ready,
        is_terminating=metadata.get("deletionTimestamp") is not None,
        is_finished=_text(status, "phase") in ("Succeeded", "Failed"),
        created_s=_seconds(metadata.get("creationTimestamp")),
        trouble_reason=trouble_reason,
        trouble=trouble,
        num_restarts=sum(_count(state, "restartCount") for state in _mappings(status, "containerStatuses")),
        ready_changed_s=_seconds(readiness.get("lastTransitionTime")),
    )


def _pool(labels: Mapping[str, Any], annotations: Mapping[str, Any]) -> str:
    """The annotation is believed where it agrees with the label, which is what pods are found by."""
    label, full = _text(labels, names.LABEL_POOL), _text(annotations, names.ANNOTATION_POOL_NAME)
    return full if full and pool_label(full) == label else label


def _owner_uid(metadata: Mapping[str, Any]) -> str | None:
    controllers = (o for o in _mappings(metadata, "ownerReferences") if o.get("controller") is True)
    return next((_text(owner, "uid") or None for owner in controllers), None)


def _trouble(status: Mapping[str, Any]) -> Trouble:
    if _text(status, "phase") == "Failed":
        said = _message(status, "message")
        return _word(_text(status, "reason") or "Failed"), said or "the pod has failed and will not run again"
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        reason = _word(_text(scheduled, "reason") or "Unschedulable")
        return reason, _message(scheduled, "message") or "the scheduler gives no reason"
    found = [_container_trouble(state) for state in _container_states(status)]
    serious = (each for each in found if each[0] not in ("", CREATING))
    return next(serious, next((each for each in found if each[0]), _NONE))


def _container_states(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The worker's own first: its words tell most."""
    states = [*_mappings(status, "containerStatuses"), *_mappings(status, "initContainerStatuses")]
    yield from sorted(states, key=lambda state: _text(state, "name") != CONTAINER)


def _container_trouble(state: Mapping[str, Any]) -> Trouble:
    now, before = _mapping(state, "state"), _mapping(_mapping(state, "lastState"), "terminated")
    if state.get("ready") is True:
        return _NONE
    if ended := _mapping(now, "terminated"):
        # An init container that has done its work is no trouble.
        return _ended(ended) if _count(ended, "exitCode") else _NONE
    return _waiting_trouble(state, _mapping(now, "waiting"), before)


def _waiting_trouble(state: Mapping[str, Any], waiting: Mapping[str, Any], before: Mapping[str, Any]) -> Trouble:
    """Of a container that waits to start, or runs and is not ready yet (then ``waiting`` is empty)."""
    reason = _text(waiting, "reason")
    if reason == "CrashLoopBackOff":
        # The kubelet's own message counts the pause up: it would be news each time.
        return _ended(before) if before else (reason, "the container ends again and again")
    if reason in _PULL_REASONS:
        said = _PULL_PREFIX.sub("", _message(waiting, "message"))
        return "ImagePullBackOff", said or f"the image {_text(state, 'image')!r} cannot be pulled"
    if reason == CREATING:
        return CREATING, "its volumes or its network are not set up; the pod's events say more"
    if reason and reason != "PodInitializing":
        return _word(reason), _message(waiting, "message") or "the kubelet gives no reason"
    return _ended(before) if before else _NONE


def _ended(terminated: Mapping[str, Any]) -> Trouble:
    """In words that stay the same when the same happens again."""
    code, reason = _count(terminated, "exitCode"), _text(terminated, "reason")
    said = _message(terminated, "message", from_end=True)
    if reason == "OOMKilled":
        text = "the container took more memory than its limit and was killed; raise the limit or lower memory.budget"
        return "OOMKilled", text
    text = f"the container ended with exit code {code}" + (f" ({reason})" if reason not in ("", "Error") else "")
    return "CrashLoopBackOff", f"{text}: {said}" if said else f"{text}; its log says more"


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in _mappings(status, "conditions") if c.get("type") == kind), {})


def _mapping(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = item.get(name) if isinstance(item, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _mappings(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = item.get(name)
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _message(item: Mapping[str, Any], name: str, *, from_end: bool = False) -> str:
    """One line that fits a status; of a log's tail, the end says most."""
    text = _NOT_PRINTABLE.sub(" ", _text(item, name)).strip()
    if len(text) <= _MAX_MESSAGE_LENGTH:
        return text
    return "…" + text[1 - _MAX_MESSAGE_LENGTH :] if from_end else text[: _MAX_MESSAGE_LENGTH - 1] + "…"


def _word(text: str) -> str:
    """As a condition's reason must look."""
    word = re.sub(r"[^A-Za-z0-9]", "", text)[:64]
    return word if word[:1].isalpha() else "Failed"


def _count(item: Mapping[str, Any], name: str) -> int:
    value = item.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _seconds(value: object) -> float:
    try:
        return unix_s_of(value)
    except (ValueError, OverflowError):
        return 0.0
