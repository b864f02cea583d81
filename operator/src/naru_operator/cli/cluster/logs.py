"""`naru cluster logs`: what the workers and the operator say of one model, line by line with their pod."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import click

from naru_operator.cli.cluster.api import ClusterApi, event_time
from naru_operator.core.kube import Object
from naru_proto import names
from naru_proto.errors import NaruError, Unavailable

_TAIL = 2000
_POLL_S = 0.5


def run_logs(api: ClusterApi, name: str, *, is_following: bool) -> int:
    """Prints the events of a model, then the lines about it in its workers' and the operator's logs.

    Raises:
        NaruError: as the API server said.
    """
    model = api.model(name)
    own = str(model["metadata"]["name"])
    for event in api.events_of(model):
        click.echo(f"{event_time(event)} event/{event.get('reason')}: {event.get('message')}")
    pods = [*_pods(api, _workers()), *_pods(api, _operators())]
    if not pods:
        raise Unavailable(f"namespace {api.namespace!r} has no worker pods to read; choose another one with -n")
    if is_following:
        for line in _followed(api, pods, own):
            click.echo(line)
        return 0
    lines = [(line, pod) for pod in pods for line in api.log_lines(pod, tail=_TAIL) if speaks_of(line, own)]
    for line, pod in sorted(lines):
        click.echo(f"{pod}: {line}")
    return 0


def speaks_of(line: str, model: str) -> bool:
    """Whether a log line names the model, alone or as one of its revisions, and not another one that begins alike."""
    start = line.find(model)
    while start >= 0:
        before = line[start - 1] if start else " "
        after = line[start + len(model)] if start + len(model) < len(line) else " "
        if not (before.isalnum() or before in "-.") and not (after.isalnum() or after in "-."):
            return True
        start = line.find(model, start + 1)
    return False


def _workers() -> str:
    return f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY},{names.LABEL_POOL}"


def _operators() -> str:
    return "app.kubernetes.io/name=naru,app.kubernetes.io/component=operator"


def _pods(api: ClusterApi, selector: str) -> list[str]:
    found: Iterator[Object] = api.items(api.core("pods"), {"labelSelector": selector})
    return sorted(str(pod["metadata"]["name"]) for pod in found)


def _followed(api: ClusterApi, pods: list[str], model: str) -> Iterator[str]:
    """Lines of all pods as they come, until every log has ended. One thread reads each."""
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)

    def read(pod: str) -> None:
        try:
            for line in api.log_lines(pod, tail=_TAIL, is_following=True):
                if speaks_of(line, model):
                    lines.put(f"{pod}: {line}")
        except NaruError as exc:
            lines.put(f"{pod}: cannot be read: {exc.message}")
        finally:
            lines.put(None)

    for pod in pods:
        threading.Thread(target=read, args=(pod,), name=f"log of {pod}", daemon=True).start()
    num_open = len(pods)
    while num_open:
        try:
            line = lines.get(timeout=_POLL_S)  # not for ever: Ctrl-C must get through
        except queue.Empty:
            continue
        if line is None:
            num_open -= 1
        else:
            yield line
