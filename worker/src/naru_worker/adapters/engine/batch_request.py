"""A request to a model that does not generate, as its engine takes it. Made by the server, in any thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from naru_worker.adapters.engine.batch_runner import Array, EncoderInput
from naru_worker.core.request import RequestId


@dataclass(frozen=True, slots=True)
class BatchInput:
    """What cannot be cut further: a text, or all tensors of one call."""

    value: EncoderInput | Mapping[str, Array]
    size: int
    """Tokens, or rows: what it costs."""
    rows: int = 1
    """Places it takes in a batch."""
    group: Hashable = ()
    """Only inputs of one group can share a batch."""
    num_bytes: int = 0
    """It holds while it waits."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Answered in one delta, once all inputs are computed, in their order."""

    request_id: RequestId
    inputs: tuple[BatchInput, ...]
    arrivals: tuple[int, ...]
    """Of each input: orders those of equal priority, and no two are equal."""
    priority: int = 0
    outputs: tuple[str, ...] = ()
    """Of a model of tensors, by name; none: all."""

    @property
    def size(self) -> int:
        """Of all inputs."""
        return sum(each.size for each in self.inputs)
