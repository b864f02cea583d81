"""What the model hub needs of the outside: something that prepares, opens and loads models, and the machine's memory.

A model goes through three hands, each holding more: prepared (files on disk, needs known), hosted (weights in host
memory), loaded (an engine that serves). All calls block and are made in loading threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.resident import Progress
from naru_worker.adapters.weights.watched_checkpoint import OnShare, unheard
from naru_worker.core.hub.model import Footprint
from naru_worker.core.residency import ModelSpec


class Interrupted(Exception):
    """The operation was told to stop, and holds nothing any more."""


class HostedModel(Protocol):
    """Weights in host memory, or on their way there."""

    def make_present(self, should_stop: threading.Event) -> None:
        """Brings all weights into memory; blocks.

        Raises:
            LoadError: the image is damaged or cannot be read.
            Interrupted: `should_stop` was set.
        """

    def load(
        self, on_started: Callable[[LoadedModel], None], should_stop: threading.Event, on_share: OnShare = unheard
    ) -> LoadedModel:
        """An engine over the weights. `on_started` gets it as soon as it takes requests, if that is before all weights
        are present; returns when they are. `on_share` is told how far they are, where that takes long.

        Raises:
            LoadError: the image is damaged, or memory was refused. Who got the model by `on_started` has to release it.
            Unavailable: the device has no room now; the weights are hosted as they were.
            Interrupted: `should_stop` was set.
        """

    def keep(self) -> str:
        """Lets the weights wait in host memory, once what was loaded from them has been released; blocks.

        Returns why they cannot, if so: then they are to be closed.

        Raises:
            DeviceFault: the device has failed.
        """

    def close(self) -> int:
        """Lets go of the weights; what was loaded from them has been released before. Again only looks.

        Returns the bytes of them that the kernel still shows as ours though nobody here uses them any more.
        """


class PreparedModel(Protocol):
    """Files that are on this machine and were checked; nothing of them is in memory."""

    footprint: Footprint
    detail: str
    """What is worth telling: a context that was cut, say."""

    def is_current(self) -> bool:
        """Whether the files are still those that were prepared; a few calls to the file system."""

    def open(self) -> HostedModel:
        """Maps the files; nothing is read yet.

        Raises:
            LoadError: the files are damaged or gone.
        """


@dataclass(frozen=True, slots=True)
class ImageUsage:
    """Packed images of a node."""

    budget_bytes: int = 0
    used_bytes: int = 0


class Loader(Protocol):
    """Prepares models."""

    def image_usage(self) -> ImageUsage:
        """Bytes of packed images; quick, from any thread."""

    def find(self, spec: ModelSpec) -> int | None:
        """Bytes of a model's files on this machine; None: they are not here. Looks at the disk alone; blocks."""

    def close(self) -> None:
        """Lets go of what is kept for the next model."""

    def prepare(
        self, name: str, spec: ModelSpec, on_progress: Callable[[Progress], None], should_stop: threading.Event
    ) -> PreparedModel:
        """Fetches and packs what is not here yet.

        Raises:
            LoadError: the model cannot be had or cannot be served.
            Interrupted: `should_stop` was set.
        """


class Memory(Protocol):
    """Memory of the machine and of this process."""

    def available_bytes(self) -> int:
        """What can be taken now, measured."""

    def release(self) -> None:
        """Gives unused memory of this process back."""
