"""One model on this worker as the shell of the hub keeps it: files, memory, engine, and who wants to hear of changes.

What is wanted and why is the hub's entry; this is what was made of it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.core.hub.model import ModelEntry
from naru_worker.core.residency import ModelSpec, ModelState

if TYPE_CHECKING:
    from naru_worker.adapters.engine.loader import HostedModel, PreparedModel


@dataclass(frozen=True, slots=True)
class Progress:
    """How a load stands."""

    state: ModelState
    bytes_done: int = 0
    bytes_total: int = 0
    detail: str = ""
    error: NaruError | None = None
    eta_s: float = 0.0
    """Seconds left; 0: unknown."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request at a model, from its arrival to its end. The hub counts it as held, then as in flight."""

    model: str
    is_held: bool
    rejected: NaruError | None = None
    """Why it will not be served, where it was turned away on arrival."""


@dataclass(slots=True, eq=False)
class Resident:
    """Mutable; touched in the asyncio thread only, but for the events of threads."""

    name: str
    entry: ModelEntry
    """The hub's own; to be read."""
    load_timeout_s: float = 0.0
    """Of the last ask; 0: the worker's."""
    progress: Progress = Progress(ModelState.COLD)
    """Of the operation under way or the last one."""
    error: NaruError | None = None
    """Of the last operation, where it failed."""
    prepared: PreparedModel | None = None
    """Files on disk."""
    prepared_spec: ModelSpec | None = None
    """What `prepared` was prepared for."""
    hosted: HostedModel | None = None
    """Weights in host memory."""
    model: LoadedModel | None = None
    held: set[Visit] = field(default_factory=set)
    stop: threading.Event = field(default_factory=threading.Event)
    """Of the operation under way."""
    task: asyncio.Task[None] | None = None
    began_s: float = 0.0
    """When the operation under way began."""
    count_began_s: float = 0.0
    """When its count of bytes began: a fetch of several parts, then packed, counts each from its start."""
    count_first_bytes: int = 0
    """What that count said first; it may go on from an earlier try."""
    fetch_s: float = 0.0
    """What its last fetch or packing took that had something to do; 0: there was none."""
    num_arrivals: int = 0
    """Times its engine was loaded."""
    epoch: int = 0
    """Number of its load among all of this worker: caches told under an older one are void."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a fresh one, at each change."""

    @property
    def state(self) -> ModelState:
        """Where the model stands."""
        return self.entry.state

    @property
    def spec(self) -> ModelSpec | None:
        """What is wanted under this name; None: nothing."""
        spec = self.entry.spec
        assert spec is None or isinstance(spec, ModelSpec)
        return spec

    @property
    def loaded_spec(self) -> ModelSpec | None:
        """What the copy in memory was loaded from."""
        spec = self.entry.loaded_spec
        assert spec is None or isinstance(spec, ModelSpec)
        return spec

    def tell(self, progress: Progress, now_s: float) -> None:
        """Notes how far the operation under way is, and makes it known."""
        last = self.progress
        goes_on = (last.state, last.bytes_total) == (progress.state, progress.bytes_total)
        if not goes_on or progress.bytes_done < last.bytes_done:
            self.count_began_s, self.count_first_bytes = now_s, progress.bytes_done
        self.progress = progress
        self.notify()

    def notify(self) -> None:
        """Makes a change known to whoever waits."""
        self.changed.set()
        self.changed = asyncio.Event()
