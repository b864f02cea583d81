"""What a request with a task is answered: vectors, tensors or tokens. Plain values, made in any thread.

Part of a delta; written into messages by the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.adapters.engine.batch_runner import Array
from naru_worker.adapters.ops.protocol import FloatArray

VECTOR_BYTES = 64
"""Of a vector or an array in a message, beside its numbers and its name."""
_ID_BYTES = 5
"""Of a token's id, or of a length."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Of one input."""

    index: int
    values: FloatArray
    prompt_tokens: int
    """That were computed."""


@dataclass(frozen=True, slots=True)
class NamedArray:
    """One output of a model of tensors."""

    name: str
    values: Array


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text in tokens."""

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    """Of each token alone, where it was asked for."""
    text: str = ""
    """Where it came from tokens."""


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """One of these."""

    vectors: tuple[Vector, ...] = ()
    arrays: tuple[NamedArray, ...] = ()
    tokens: Tokens | None = None

    @property
    def num_bytes(self) -> int:
        """About what it takes on the wire, on the high side."""
        count = sum(each.values.nbytes + VECTOR_BYTES for each in self.vectors)
        count += sum(_array_bytes(each.values) + VECTOR_BYTES + 4 * len(each.name) for each in self.arrays)
        if self.tokens is not None:
            texts = (self.tokens.text, *self.tokens.texts)
            count += _ID_BYTES * len(self.tokens.token_ids) + sum(4 * len(text) + _ID_BYTES for text in texts)
        return count


def _array_bytes(values: Array) -> int:
    if values.dtype.kind == "O":
        return sum(_ID_BYTES + 4 * len(each) for each in values.reshape(-1).tolist())
    return int(values.nbytes)
