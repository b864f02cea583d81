"""What models that do not generate offer to the engine: one batch in, one result for each of its items out.

`adapters/engine/batch_engine.py` calls them in the engine thread; the GIL is free while they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from naru_proto.registry import TensorRecord
from naru_worker.adapters.ops.protocol import FloatArray

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """One text, or one pair, in tokens; special tokens included."""

    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] = ()
    """Empty: all 0. Else as long as token_ids: 1 for those of the second text."""


class EncoderRunner(Protocol):
    """Turns token sequences into a vector each, or into scores; a result does not depend on its batch mates."""

    weight_bytes: int
    workspace_bytes: int
    width: int
    """Numbers of a result: the dimension of vectors, or the number of labels."""
    max_num_tokens: int
    """Most tokens of one call, over all inputs."""

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        """(len(inputs), width), pooled, not yet of length 1; scores before any sigmoid. The caller's own."""

    def close(self) -> None:
        """Gives back all memory."""


class TensorRunner(Protocol):
    """A model of named tensors."""

    weight_bytes: int
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """The outputs named, all of them where none is. Where the model takes batches, the first dimension is one.

        Raises:
            InvalidRequest: what the model refuses, in its own words.
        """

    def close(self) -> None:
        """Gives back all memory."""
