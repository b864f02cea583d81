"""One model on this worker as the host keeps it: what is desired, what is, and who wants to hear of changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.core.residency import Desired, ModelSpec, ModelState


@dataclass(frozen=True, slots=True)
class Progress:
    """How a load stands."""

    state: ModelState
    bytes_done: int = 0
    bytes_total: int = 0
    detail: str = ""
    error: NaruError | None = None


@dataclass(slots=True, eq=False)
class Resident:
    """Mutable; touched in the asyncio thread only."""

    name: str
    desired: Desired
    progress: Progress = Progress(ModelState.COLD)
    model: LoadedModel | None = None
    loaded_spec: ModelSpec | None = None
    """What `model` was loaded from."""
    drain_timeout_s: float = 0.0
    """Of the last unload asked for."""
    booked_bytes: int = 0
    """Memory promised to it, loading included."""
    task: asyncio.Task[None] | None = None
    """Brings what is to what is desired; None when it is there, or has failed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a fresh one, at each change."""

    @property
    def state(self) -> ModelState:
        """Where the model stands."""
        return self.progress.state

    def show(self, progress: Progress) -> None:
        """Makes a change known to whoever waits."""
        self.progress = progress
        self.changed.set()
        self.changed = asyncio.Event()
