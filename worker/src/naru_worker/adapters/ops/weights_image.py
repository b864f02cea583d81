"""Weights that lie in memory as the kernels read them: what a packed image offers the CPU backend.

Implemented by `adapters/images`; read by `adapters/ops/cpu`. Nothing is copied: matrices are read where they lie, and
the image stays mapped as long as a runner uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from naru_worker.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class SegmentPlace:
    """One part of a stacked matrix, packed by `naru_pack_segment`."""

    format: int
    """`Format` of native/src/matrix.h."""
    num_rows: int
    offset: int
    """Bytes from the start of the image, a multiple of 64."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MatrixPlace:
    """One linear weight."""

    num_columns: int
    segments: tuple[SegmentPlace, ...]
    bias_offset: int = -1
    """float32, one per row and 16 zeros of padding, 64-byte aligned; -1: it has none."""


class WeightsImage(Protocol):
    """A mapped image. Names are the canonical ones of a checkpoint; a stack goes by the names of its parts."""

    config: ModelConfig

    @property
    def address(self) -> int:
        """Of the image's first byte in this process."""

    @property
    def num_bytes(self) -> int:
        """Of the whole mapping."""

    def has(self, name: str) -> bool:
        """Whether a tensor of that canonical name (a bias, say) went into the image."""

    def matrix(self, names: tuple[str, ...]) -> MatrixPlace:
        """Where a stack of parts lies.

        Raises:
            LoadError: the image has no such matrix.
        """

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A vector's values; a view of the image.

        Raises:
            LoadError: the image has no such vector.
        """
