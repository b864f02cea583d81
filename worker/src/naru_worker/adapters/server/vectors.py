"""From what a model computed to what was asked for: cut, normalised, or squeezed into a score. No I/O, no state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from naru_proto.errors import InternalError
from naru_worker.adapters.ops.protocol import FloatArray


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How the vectors of one request leave."""

    dimensions: int = 0
    """The first so many numbers; 0: all."""
    normalize: bool = False
    """At length 1; a vector of zeros stays one."""
    sigmoid: bool = False

    def apply(self, rows: FloatArray) -> FloatArray:
        """(inputs, numbers), float32; a new array.

        Raises:
            InternalError: a number is not finite.
        """
        out = np.array(rows[:, : self.dimensions] if self.dimensions else rows, np.float32)
        if not np.isfinite(out).all():
            raise InternalError("the model gave numbers that are not finite; its weights or its input are to blame")
        if self.sigmoid:
            # Either side of 0 by the form that cannot overflow.
            shrunk = np.exp(-np.abs(out))
            return np.where(out >= 0, 1.0 / (1.0 + shrunk), shrunk / (1.0 + shrunk)).astype(np.float32)
        if self.normalize:
            # In double: squares of float32 overflow at 1e19.
            lengths = np.linalg.norm(out.astype(np.float64), axis=1, keepdims=True)
            out = (out / np.where(lengths > 0.0, lengths, 1.0)).astype(np.float32)
        return out
