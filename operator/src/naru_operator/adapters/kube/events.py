"""Kubernetes events: their form, and the memory that keeps one from being sent again and again. Called by the client.

Sends nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime

from naru_operator.adapters.kube.kinds import EVENT
from naru_operator.core.kube import Object, ObjectEvent, key_of
from naru_proto import names

_QUIET_S = 600.0
"""The same words about the same object are not said again for this long."""
_MAX_KNOWN = 8192
"""Events remembered: four for each of two thousand objects."""
_MAX_NOTE_BYTES = 1024
_MAX_REASON = 128
"""Limits of events.k8s.io/v1."""
_MAX_NAME = 200
"""Of the object's name in the event's, which may have 253 characters with what makes it unique."""


class EventMemory:
    """What was said lately."""

    def __init__(self) -> None:
        self._said_s: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def __len__(self) -> int:
        """Events remembered."""
        return len(self._said_s)

    def is_news(self, uid: str, event: ObjectEvent, now_s: float) -> bool:
        """Whether it is to be said; if so, it counts as said. ``now_s`` is monotonic."""
        key = (uid, event.reason, event.message)
        said_s = self._said_s.get(key)
        if said_s is not None and now_s - said_s < _QUIET_S:
            return False
        self._said_s[key] = now_s
        self._said_s.move_to_end(key)
        while len(self._said_s) > _MAX_KNOWN:
            self._said_s.popitem(last=False)
        return True

    def forget(self, uid: str, event: ObjectEvent) -> None:
        """It could not be sent: the next time it is news again."""
        self._said_s.pop((uid, event.reason, event.message), None)


def event_object(event: ObjectEvent, involved: Object, instance: str, at: datetime) -> Object:
    """The event as an object of events.k8s.io/v1; texts are cut to its limits. ``at`` is aware."""
    key = key_of(involved)
    at = at.astimezone(UTC)
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {
            "name": f"{key.name[:_MAX_NAME]}.{int(at.timestamp() * 1e6):x}",
            "namespace": key.namespace,
            "labels": {names.LABEL_MANAGED_BY: names.MANAGED_BY},
        },
        "regarding": {
            "apiVersion": involved.get("apiVersion", ""),
            "kind": involved.get("kind", event.kind),
            "namespace": key.namespace,
            "name": key.name,
            "uid": involved["metadata"].get("uid", ""),
        },
        "type": "Warning" if event.is_warning else "Normal",
        "reason": event.reason[:_MAX_REASON],
        "action": "Reconcile",
        "note": _cut(event.message),
        "eventTime": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": names.MANAGED_BY,
        "reportingInstance": instance[:_MAX_REASON],
    }


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= _MAX_NOTE_BYTES:
        return text
    return data[: _MAX_NOTE_BYTES - 3].decode(errors="ignore") + "…"
