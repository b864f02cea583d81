"""How kopf is set up to watch and do nothing else. Used by the watch.

Only `on.event` handlers are registered: kopf writes nothing, needs no finalizer, no annotation and no peering, and
keeps no record of ours. Everything it would compute for handlers that remember is left out: it is two thirds of the
work on an event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kopf

from naru_operator.adapters.kube.kinds import WATCHED, Kind
from naru_operator.adapters.kube.kopf_login import Login
from naru_operator.core.kube import Object


@dataclass(frozen=True, slots=True)
class Sight:
    """An object as a watch showed it."""

    kind: str
    obj: Object
    is_deleted: bool


OnSight = Callable[[Sight], None]
"""Called in kopf's own loop and thread."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """When a silent stream counts as dead, and how long things take at most."""

    inactivity_s: float = 75.0
    """A stream without even a bookmark for this long is opened anew: the API server sends one each minute. Whatever
    swallows a connection costs no more than this.
    """
    server_timeout_s: int = 240
    """The API server ends a stream after this long, and the next one goes on from there."""
    client_timeout_s: float = 300.0
    """Most seconds of one stream, should the server not end it."""
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    """Of the lists before a stream."""
    page: int = 500
    """Objects in one page of a list."""
    error_pauses_s: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 3.0, 3.0)
    """Between attempts of one request."""


def registry(login: Login, on_sight: OnSight, on_end: Callable[[], None]) -> kopf.OperatorRegistry:
    """Handlers of one watch; nothing is registered globally. All are called in kopf's loop.

    ``on_end`` is called when kopf begins to end, for whatever reason.
    """
    made = kopf.OperatorRegistry()

    async def cleanup(**_: Any) -> None:
        on_end()

    async def log_in(**_: Any) -> kopf.AiohttpSession | None:
        return await login()

    kopf.on.cleanup(registry=made, id="cleanup")(cleanup)
    kopf.on.login(registry=made, id="login", errors=kopf.ErrorsMode.PERMANENT)(log_in)
    for kind in WATCHED:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id=kind.name)(_handler(kind, on_sight))
    return made


def settings(wanted: WatchSettings) -> kopf.OperatorSettings:
    """The settings of kopf itself."""
    made = kopf.OperatorSettings()
    made.watching.inactivity_timeout = wanted.inactivity_s
    made.watching.server_timeout = wanted.server_timeout_s
    made.watching.client_timeout = wanted.client_timeout_s
    made.watching.connect_timeout = wanted.connect_timeout_s
    made.watching.chunk_size = wanted.page
    made.networking.request_timeout = wanted.request_timeout_s
    made.networking.connect_timeout = wanted.connect_timeout_s
    made.networking.error_backoffs = wanted.error_pauses_s
    made.posting.enabled = False
    made.scanning.disabled = True  # no reading of CRDs and namespaces
    made.queueing.idle_timeout = 1.0  # thousands of objects each keep a task this long
    made.process.ultimate_exiting_timeout = None  # it would kill the process
    made.persistence.diffbase_storage = _NoDiffBase()
    made.persistence.progress_storage = _NoProgress()
    for kind, selector in WATCHED.items():
        if selector:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return made


def _handler(kind: Kind, on_sight: OnSight) -> Callable[..., Any]:
    async def handle(event: Any, **_: Any) -> None:
        obj = event["object"]
        # The object stays kopf's; ours is a copy as far as it differs.
        metadata = {name: value for name, value in obj["metadata"].items() if name != "managedFields"}
        kept = {"apiVersion": kind.api_version, "kind": kind.name, **obj, "metadata": metadata}
        on_sight(Sight(kind.name, kept, event["type"] == "DELETED"))

    return handle


class _NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no last state of objects."""

    def build(self, **_: Any) -> Any:
        """Nothing is worth comparing."""
        return {}

    def fetch(self, **_: Any) -> None:
        """There is none."""

    def store(self, **_: Any) -> None:
        """Never asked for: nothing changes."""


class _NoProgress(kopf.ProgressStorage):
    """Remembers no progress of handlers."""

    def fetch(self, **_: Any) -> None:
        """There is none."""

    def store(self, **_: Any) -> None:
        """Never asked for: watching has no progress."""

    def purge(self, **_: Any) -> None:
        """There is nothing."""

    def touch(self, **_: Any) -> None:
        """There is nothing."""

    def clear(self, *, essence: Any) -> Any:
        """As it is."""
        return essence
