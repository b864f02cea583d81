"""`naru rollout`: where the change of a model stands, what revisions there were, and back to one of them."""

from __future__ import annotations

import time
from typing import Any

import click

from naru_operator.cli.cluster.api import ClusterApi
from naru_operator.cli.text import table
from naru_operator.core.kube import Object
from naru_proto import names
from naru_proto.errors import InvalidRequest

EXIT_FAILED, EXIT_TIMEOUT = 1, 3
_POLL_S = 1.0
REVISION_FIELDS = ("model", "adapters", "engine", "resources")
"""Parts of the spec that make a revision; a change of any other is no rollout."""


def condition(item: Object, kind: str) -> Object | None:
    """The condition of that type."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((it for it in conditions if it.get("type") == kind), None)


def rollout_line(item: Object) -> tuple[str, bool, bool]:
    """(what to say, whether the rollout is over, whether it went wrong)."""
    status, meta = item.get("status") or {}, item["metadata"]
    if (status.get("observedGeneration") or 0) < (meta.get("generation") or 0):
        return "waiting for the operator to see the change", False, False
    progressing, accepted = condition(item, "Progressing"), condition(item, "Accepted")
    if accepted is not None and accepted["status"] == "False":
        return f"refused ({accepted['reason']}): {accepted.get('message', '')}", True, True
    if progressing is None:
        return "waiting for the operator", False, False
    current, update = status.get("currentRevision"), status.get("updateRevision")
    words = f"{progressing['reason']}: {progressing.get('message', '')}".rstrip(": ")
    if progressing["status"] == "False":
        return f"failed ({words})", True, True
    if update and current == update:
        return f"revision {current} serves ({words})", True, False
    return f"{current or 'nothing'} serves, {update} is on its way ({words})", False, False


def run_rollout_status(api: ClusterApi, name: str, *, is_waiting: bool, timeout_s: float) -> int:
    """Prints each new state until the rollout is over; 1 if it failed, 3 if that took too long.

    Raises:
        NaruError: as the API server said.
    """
    deadline_s, said = time.monotonic() + timeout_s, ""
    while True:
        line, is_over, is_bad = rollout_line(api.model(name))
        if line != said:
            click.echo(f"{name}: {line}")
            said = line
        if is_over:
            return EXIT_FAILED if is_bad else 0
        if not is_waiting:
            return 0
        if time.monotonic() > deadline_s:
            click.echo(f"error: not done after {timeout_s:g} s; it goes on", err=True)
            return EXIT_TIMEOUT
        time.sleep(_POLL_S)


def run_rollout_history(api: ClusterApi, name: str) -> int:
    """Prints the revisions, oldest first.

    Raises:
        NaruError: as the API server said.
    """
    model = api.model(name)
    status = model.get("status") or {}
    rows = []
    for item in api.revisions(model):
        digest = _digest(item)
        marks = [
            word
            for word, field in (("serves", "currentRevision"), ("wanted", "updateRevision"))
            if status.get(field) == digest
        ]
        source = (item.get("data") or {}).get("model") or {}
        rows.append(
            (
                str(item.get("revision")),
                digest,
                ", ".join(marks) or "-",
                str(item["metadata"].get("creationTimestamp", "-")),
                str(source.get("uri", "-")) + (f" at {source['revision']}" if source.get("revision") else ""),
            )
        )
    click.echo(table(("REVISION", "DIGEST", "STATE", "CREATED", "SOURCE"), rows))
    return 0


def run_rollout_undo(api: ClusterApi, name: str, to_revision: int | None) -> int:
    """Writes an earlier revision's part of the spec back; the operator rolls it out like any change.

    Raises:
        InvalidRequest: there is no such revision.
        NaruError: as the API server said.
    """
    model = api.model(name)
    target = _target(model, api.revisions(model), to_revision)
    path = api.custom("modeldeployments", model["metadata"]["name"])
    api.patch(path, undo_patch(model, target))
    click.echo(f"{model['metadata']['name']}: back to revision {target['revision']} ({_digest(target)})")
    return 0


def undo_patch(model: Object, revision: Object) -> list[dict[str, Any]]:
    """The JSON patch that gives a model's spec the part of an earlier revision, and refuses a spec that changed."""
    data, spec = revision.get("data") or {}, model["spec"]
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/generation", "value": model["metadata"]["generation"]}
    ]
    for field in REVISION_FIELDS:
        if field in data:
            operations.append({"op": "add", "path": f"/spec/{field}", "value": data[field]})
        elif field in spec:
            operations.append({"op": "remove", "path": f"/spec/{field}"})
    return operations


def _target(model: Object, revisions: list[Object], to_revision: int | None) -> Object:
    if to_revision is not None:
        for item in revisions:
            if int(item.get("revision") or 0) == to_revision:
                return item
        known = ", ".join(str(item.get("revision")) for item in revisions) or "none"
        raise InvalidRequest(f"there is no revision {to_revision}; there are: {known}", param="to-revision")
    wanted = (model.get("status") or {}).get("updateRevision")
    earlier = [item for item in revisions if _digest(item) != wanted]
    current = (model.get("status") or {}).get("currentRevision")
    serving = [item for item in earlier if _digest(item) == current]
    if serving:
        return serving[0]  # a rollout is under way or has failed: what serves is where to go
    if not earlier:
        raise InvalidRequest("there is no earlier revision to go back to; `naru rollout history` lists them")
    return earlier[-1]


def _digest(item: Object) -> str:
    return str((item["metadata"].get("annotations") or {}).get(names.ANNOTATION_REVISION_DIGEST, "-"))
