"""Weights as other quantizers store them (GPTQ, AWQ, FP8 with a scale a row), repacked for the kernels.

Pure functions of arrays as the checkpoints hold them; who reads the checkpoint tells group size and symmetry from its
quantization config. On the CPU, some rows at a time.

Source: the formats of AutoGPTQ / GPTQModel and AutoAWQ, as their checkpoints lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import Fp8Rows
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupKind, GroupRows
from naru_worker.adapters.ops.cuda.weights import empty_rows, fill_rows

Words = npt.NDArray[np.int32]
Floats = npt.NDArray[Any]

_NIBBLES = 8
"""Integers in a word."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each nibble, from the lowest."""
_STEP_ELEMENTS = 1 << 21
_GROUPS = (32, 64, 128)


def packed_kind(group_size: int, num_columns: int, *, symmetric: bool, name: str = "weight") -> GroupKind:
    """How a 4-bit matrix will lie, before anything of it is read.

    Args:
        group_size: 32, 64, 128; -1 where all columns of a row share a scale.
        num_columns: in_features.
        symmetric: Whether 8 stands for 0 everywhere.
        name: Of the tensor, for errors.

    Raises:
        LoadError: the group size is another, or the columns are no multiple of it.
    """
    group = 128 if group_size == -1 else group_size
    if group not in _GROUPS or num_columns % group:
        raise LoadError(
            f"{name!r} has {num_columns} columns in groups of {group_size}; groups of 32, 64, 128 or whole rows (-1, "
            "of a multiple of 128 columns) are supported"
        )
    return GroupKind(4, group, 8 if symmetric else 0, not symmetric)  # type: ignore[arg-type]  # checked just now


def from_gptq(
    qweight: Words,
    qzeros: Words,
    scales: Floats,
    g_idx: npt.NDArray[Any] | None = None,
    *,
    group_size: int,
    symmetric: bool,
    stores_zero_minus_one: bool = True,
    name: str = "weight",
) -> GroupRows:
    """A 4-bit matrix of a GPTQ checkpoint.

    Args:
        qweight: (K / 8, N); the nibbles of a word, from the lowest, are consecutive columns of the weight.
        qzeros: (K / group, N / 8); the nibbles of a word are consecutive rows of the weight.
        scales: (K / group, N).
        g_idx: (K,), the group of each column; None: in order.
        group_size: See `packed_kind`.
        symmetric: What the config says; checked.
        stores_zero_minus_one: As all but the second version of the format does.
        name: Of the tensor, for errors.

    Raises:
        LoadError: shapes do not fit, columns are reordered (desc_act), or the zeros contradict `symmetric`.
    """
    columns, rows = qweight.shape[0] * _NIBBLES, qweight.shape[1]
    kind = packed_kind(group_size, columns, symmetric=symmetric, name=name)
    groups = columns // (columns if group_size == -1 else group_size)
    _check(name, "qzeros", qzeros, (groups, rows // _NIBBLES))
    _check(name, "scales", scales, (groups, rows))
    if g_idx is not None and not np.array_equal(g_idx, np.arange(columns) // (columns // groups)):
        raise LoadError(f"{name!r} has its columns reordered by activation (desc_act), which is not supported")
    zeros = _nibbles(qzeros, range(_NIBBLES)).reshape(groups, rows) + np.uint8(stores_zero_minus_one)

    def integers(first: int, last: int) -> npt.NDArray[np.uint8]:
        words = np.ascontiguousarray(qweight[:, first:last].T)
        return _nibbles(words, range(_NIBBLES)).reshape(last - first, columns)

    return _packed(kind, columns, scales, zeros, integers, name)


def from_awq(
    qweight: Words, qzeros: Words, scales: Floats, *, group_size: int, name: str = "weight"
) -> GroupRows:  # fmt: skip
    """A 4-bit matrix of an AWQ checkpoint (its GEMM form).

    Args:
        qweight: (K, N / 8); the nibbles of a word are eight neighbouring rows of the weight, the even ones first.
        qzeros: (K / group, N / 8), in the same order.
        scales: (K / group, N).
        group_size: See `packed_kind`.
        name: Of the tensor, for errors.

    Raises:
        LoadError: shapes do not fit.
    """
    columns, rows = qweight.shape[0], qweight.shape[1] * _NIBBLES
    kind = packed_kind(group_size, columns, symmetric=False, name=name)
    groups = columns // (columns if group_size == -1 else group_size)
    _check(name, "qzeros", qzeros, (groups, rows // _NIBBLES))
    _check(name, "scales", scales, (groups, rows))
    order = [_AWQ_ORDER.index(i) for i in range(_NIBBLES)]
    zeros = _nibbles(qzeros, order).reshape(groups, rows)

    def integers(first: int, last: int) -> npt.NDArray[np.uint8]:
        words = qweight[:, first // _NIBBLES : last // _NIBBLES]
        return np.ascontiguousarray(_nibbles(words, order).reshape(columns, last - first).T)

    return _packed(kind, columns, scales, zeros, integers, name)


def weight_only(rows: Fp8Rows) -> GroupRows:
    """8-bit floats as `gemm_groups` multiplies them with activations of 16 bits; a copy, on the CPU.

    Raises:
        LoadError: a value is not finite.
    """
    if rows.values.float().isnan().any():
        raise LoadError("an FP8 weight has values that are not numbers")
    kind = GroupKind(8, 0, 0, False, is_float=True)
    packed = empty_rows(kind, rows.num_rows, rows.num_columns)
    values = rows.values.cpu().view(torch.uint8).numpy()
    fill_rows(packed, 0, values, rows.scales.cpu().numpy()[:, None], None, "FP8 weight")
    return packed


def from_fp8(values: Tensor, scales: Tensor, *, name: str = "weight") -> Fp8Rows:
    """A matrix of an FP8 checkpoint.

    Args:
        values: (N, K), float8_e4m3fn.
        scales: (N,), (N, 1) or one for all, what values are multiplied with.
        name: Of the tensor, for errors.

    Raises:
        LoadError: it is of another type, or scaled in another way (by blocks, say).
    """
    if values.dtype != torch.float8_e4m3fn or values.ndim != 2 or scales.numel() not in (1, len(values)):
        raise LoadError(
            f"{name!r} is {values.dtype} of shape {tuple(values.shape)} with scales of shape {tuple(scales.shape)}; "
            "float8_e4m3fn with one scale, or one a row, is supported"
        )
    return Fp8Rows(values.contiguous(), scales.float().reshape(-1).expand(len(values)).contiguous())


def _check(name: str, what: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise LoadError(f"{name!r} has {what} of shape {array.shape}; {shape} is needed")


def _nibbles(words: Words, order: Any) -> npt.NDArray[np.uint8]:
    """The nibbles of each word along a new last axis, in this order."""
    shifts = np.array([4 * i for i in order], np.uint32)
    return ((words.view(np.uint32)[..., None] >> shifts) & np.uint32(15)).astype(np.uint8)


def _packed(
    kind: GroupKind,
    columns: int,
    scales: Floats,
    zeros: npt.NDArray[np.uint8],
    integers: Callable[[int, int], npt.NDArray[np.uint8]],
    name: str,
) -> GroupRows:
    """Fills a matrix some rows at a time; scales and zeros are (groups, rows)."""
    if not kind.has_minimum and np.any(zeros != kind.zero):
        raise LoadError(f"{name!r} is said to be symmetric, but 8 does not stand for 0 in all of its groups")
    repeats = columns // kind.group // len(scales)
    wide = np.repeat(scales.astype(np.float32), repeats, axis=0)
    minimums = -wide * np.repeat(zeros, repeats, axis=0) if kind.has_minimum else None
    packed = empty_rows(kind, scales.shape[1], columns)
    step = max(_NIBBLES, _STEP_ELEMENTS // columns // _NIBBLES * _NIBBLES)
    for first in range(0, packed.num_rows, step):
        last = min(first + step, packed.num_rows)
        least = None if minimums is None else minimums[:, first:last].T
        fill_rows(packed, first, integers(first, last), wide[:, first:last].T, least, name)
    return packed
