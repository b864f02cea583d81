"""A checkpoint that says how far its reader is, tensor by tensor. Whoever is told may break the reading off."""

from __future__ import annotations

import math
from collections.abc import Callable

from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.weight_layout import expected_shapes

OnShare = Callable[[int, int], None]
"""Takes how much is done, and what there is in all: numbers in any unit."""


def unheard(done: int, total: int) -> None:
    """Where nobody wants to know."""


class WatchedCheckpoint:
    """Implements `Checkpoint` over another one, for one pass over its tensors."""

    def __init__(self, whole: Checkpoint, on_share: OnShare) -> None:
        """`on_share` is called before each tensor is handed out; what it raises goes to the reader."""
        self.config = whole.config
        self.chat_template = whole.chat_template
        self._whole = whole
        self._on_share = on_share
        self._num_done = 0
        self._num_all = sum(map(math.prod, expected_shapes(whole.config).values()))

    @property
    def revision(self) -> str:
        """Of the whole model."""
        return self._whole.revision

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self._whole.has(name)

    def get(self, name: str) -> RawTensor:
        """One tensor.

        Raises:
            LoadError: the tensor is missing or does not fit the config.
            Exception: whatever `on_share` raises.
        """
        self._on_share(min(self._num_done, self._num_all), self._num_all)
        tensor = self._whole.get(name)
        self._num_done += math.prod(tensor.shape)
        return tensor

    def close(self) -> None:
        """Closes the other one."""
        self._whole.close()


def watched(checkpoint: Checkpoint, on_share: OnShare | None) -> Checkpoint:
    """The checkpoint, watched where somebody wants to hear of it."""
    return checkpoint if on_share is None else WatchedCheckpoint(checkpoint, on_share)
