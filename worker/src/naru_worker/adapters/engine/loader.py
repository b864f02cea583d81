"""What the model host needs of the outside: something that loads models, and the machine's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.resident import Progress
from naru_worker.core.memory_plan import MemoryNeed, MemoryPlan, MemoryWish
from naru_worker.core.residency import ModelSpec


class Superseded(Exception):
    """Something else was asked for while a model was loading; raised inside the load to end it."""


class OpenedModel(Protocol):
    """Files that were fetched, opened and checked; no weight was read."""

    need: MemoryNeed
    wish: MemoryWish

    def build(self, plan: MemoryPlan) -> LoadedModel:
        """Reads the weights; blocks.

        Raises:
            LoadError: the files are not what they said.
        """

    def close(self) -> None:
        """Lets go of the files."""


class Loader(Protocol):
    """Opens models. Called in a loading thread."""

    def open(self, name: str, spec: ModelSpec, on_progress: Callable[[Progress], None]) -> OpenedModel:
        """Fetches and opens; blocks. What `on_progress` raises ends it.

        Raises:
            LoadError: the model cannot be had or cannot be served.
        """


class Memory(Protocol):
    """Free memory of the machine."""

    def available_bytes(self) -> int:
        """What can be taken now, measured."""

    def release(self) -> None:
        """Gives unused memory of this process back."""
