"""How quantized weights lie on a GPU: small integers in groups along the columns, with a scale (and minimum) a group.

Made by `weights`; read by the kernels that multiply with such weights.

Integers of `CHUNK_BYTES` bytes of a row lie together, and the rows of one chunk follow one another, so that a tile of
rows is one run of memory. With 4 bits the low halves of a chunk's bytes are its first columns, and the high halves the
columns after them: both halves unpack without moving an element to another place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_BYTES = 32
"""Bytes of a row that lie together; groups of 16 bytes make chunks of 16."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """What decides about the code of a kernel: value = (integer - zero) * scale, or integer * scale + minimum."""

    bits: Literal[4, 8]
    group: Literal[0, 16, 32, 64, 128]
    """Columns that share a scale; 0: all of a row do, of 8-bit floats."""
    zero: int
    """The integer that stands for 0; 0 where groups have a minimum."""
    has_minimum: bool
    is_float: bool = False
    """Not integers, but 8-bit floats (e4m3)."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one row in one chunk."""
        return self.group if self.group == 16 else CHUNK_BYTES

    @property
    def chunk_columns(self) -> int:
        """Columns of one chunk; a matrix is padded to whole chunks, with scales and minimums of 0."""
        return self.chunk_bytes * 8 // self.bits

    def num_chunks(self, columns: int) -> int:
        """Chunks along a row, the padded one included."""
        return -(-columns // self.chunk_columns)

    def num_groups(self, columns: int) -> int:
        """Groups along a row, padding included."""
        return -(-self.num_chunks(columns) * self.chunk_columns // self.group) if self.group else 1

    @property
    def scale_type(self) -> torch.dtype:
        """Of scales and minimums; those of 8-bit floats are smaller than 16 bits hold exactly."""
        return torch.float32 if self.is_float else torch.float16

    @property
    def name(self) -> str:
        """For names of compile cases: ``w4-g32-min``."""
        return f"w{self.bits}-g{self.group}-" + (
            "e4m3" if self.is_float else "min" if self.has_minimum else f"z{self.zero}"
        )

    @property
    def group_bits(self) -> int:
        """A column's group is the column shifted right by so many bits; 31 where a row is one group."""
        return self.group.bit_length() - 1 if self.group else 31

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are told of a kind."""
        return {
            "BITS": self.bits,
            "CHUNK": self.chunk_bytes,
            "ZERO": self.zero,
            "IS_FLOAT": self.is_float,
            "IS_ROW": self.is_float and self.group == 0,
            "HAS_MINIMUM": self.has_minimum,
        }


KINDS = (
    GroupKind(4, 32, 8, False),  # q4_0
    GroupKind(4, 32, 0, True),  # q4_1, q4_k
    GroupKind(4, 64, 8, False),  # GPTQ and packed integers; with a minimum AWQ, too
    GroupKind(4, 64, 0, True),
    GroupKind(4, 128, 8, False),
    GroupKind(4, 128, 0, True),
    GroupKind(8, 32, 128, False),  # q8_0
    GroupKind(8, 16, 32, False),  # q6_k
    GroupKind(8, 0, 0, False, is_float=True),  # FP8 with a scale a row, where tensor cores have none
    GroupKind(8, 32, 0, False, is_float=True),  # FP8 with scales of blocks
    GroupKind(8, 128, 0, False, is_float=True),
)
"""All that kernels are compiled for."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """A quantized matrix, (num_rows, num_columns) = (out_features, in_features)."""

    kind: GroupKind
    num_rows: int
    num_columns: int
    quants: Tensor
    """(num_chunks, num_rows, chunk_bytes), uint8."""
    scales: Tensor
    """(num_groups, num_rows), the kind's `scale_type`."""
    minimums: Tensor | None
    """(num_groups, num_rows), the kind's `scale_type`; None where groups have none."""

    def placed(self, place: Callable[[Tensor], Tensor]) -> GroupRows:
        """The same with each tensor where `place` puts it: on a device, or into an arena."""
        minimums = None if self.minimums is None else place(self.minimums)
        return replace(self, quants=place(self.quants), scales=place(self.scales), minimums=minimums)


def group_bytes(kind: GroupKind, num_rows: int, num_columns: int) -> int:
    """Bytes of a matrix of this kind in memory."""
    a_row = kind.num_chunks(num_columns) * kind.chunk_bytes
    a_row += kind.num_groups(num_columns) * kind.scale_type.itemsize * (2 if kind.has_minimum else 1)
    return num_rows * a_row


@triton.jit
def quants_to_floats(integers, BITS: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, dtype: tl.constexpr):
    """(integer - ZERO) of uint8, or the 8-bit float that it is: exact. Sets bits, since conversions are slow."""
    if IS_FLOAT:
        # The same fields lie in wider floats; what the smaller exponent lacks is a power of two. Not made for NaN.
        wide = integers.to(tl.int16)
        if dtype == tl.bfloat16:
            result = (((wide & 0x80) << 8) | ((wide & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * 2.0**120
        else:
            result = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    elif dtype == tl.float16:
        result = (integers.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)
    elif (dtype == tl.bfloat16) and ((BITS == 4) or (ZERO < 64)):
        # 7 bits of mantissa: fits integers up to 127.
        result = (integers.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + ZERO)
    else:
        wide = (integers.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
        result = wide
    return result.to(dtype)
