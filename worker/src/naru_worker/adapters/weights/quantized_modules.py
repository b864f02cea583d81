"""Matrices of quantized Hugging Face folders (GPTQ, AWQ, compressed-tensors, FP8) as blocks along the columns.

Called when such a folder is opened, for each matrix that the model needs: types and shapes of its tensors are checked
then, numbers when its rows are made. Knows no model.

Source: the layouts of AutoGPTQ / GPTQModel, AutoAWQ (gemm), compressed-tensors, AutoFP8 and DeepSeek V3, as their
checkpoints lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import FloatArray, RawTensor, TensorFormat
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.weights.block_rows import GROUPED, float_rows, four_bit_rows
from naru_worker.adapters.weights.lazy_tensor import Bytes, LazyTensor
from naru_worker.adapters.weights.safetensors_file import FORMATS, StoredTensor
from naru_worker.adapters.weights.tensor_format import BLOCKS
from naru_worker.core.quantization import Quantization

Words = npt.NDArray[np.uint32]
_MARKS = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "fp8": "weight"}
"""The tensor of a module that tells that it is quantized."""
_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_zero_point", "weight_scale", "weight_scale_inv",
    "weight_shape", "weight_g_idx", "input_scale", "input_zero_point", "k_scale", "v_scale", "output_scale",
)  # fmt: skip
"""What a quantized module, or the attention around it, may have beside its weight and bias."""
_NIBBLES = 8
"""Integers in a word."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word, from the lowest, each of eight neighbours lies."""
_ZERO = 8
_ONES = np.uint32(0x11111111)
_NAN = 0x7F


def is_part(name: str) -> bool:
    """Whether a tensor only belongs to a quantized weight."""
    return name.rpartition(".")[2] in _PARTS


class QuantizedModules:
    """The quantized modules of one folder."""

    def __init__(self, where: str, config: Quantization, stored: Mapping[str, StoredTensor]) -> None:
        """`where`: the folder, for errors; `stored`: all of its tensors."""
        self._where = where
        self._config = config
        self._stored = stored

    def weight(self, module: str, shape: tuple[int, int]) -> LazyTensor | None:
        """The weight of a module that is to be (out_features, in_features); None: it is plain, or not there.

        Raises:
            LoadError: its tensors do not fit, or hold what is not supported.
        """
        config = self._config
        mark = self._stored.get(f"{module}.{_MARKS[config.method]}")
        if module in config.plain_modules or mark is None or (config.is_float and mark.dtype in FORMATS):
            return None
        part = _Module(self._where, module, shape, config, self._stored)
        return part.floats() if config.is_float else part.integers()


@dataclass(frozen=True, slots=True)
class _Module:
    where: str
    name: str
    shape: tuple[int, int]
    config: Quantization
    stored: Mapping[str, StoredTensor]

    def fail(self, part: str, problem: str) -> NoReturn:
        name = f"{self.name}.{part}"
        raise LoadError(f"{self.where}: tensor {name!r} {problem}", param=name)

    def take(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        """A tensor of the module, of one of these types and shapes."""
        tensor = self.stored.get(f"{self.name}.{part}")
        if tensor is None:
            self.fail(part, f"is missing beside {_MARKS[self.config.method]!r}")
        if tensor.dtype not in dtypes:
            self.fail(part, f"is {tensor.dtype}; it must be {' or '.join(dtypes)}")
        if tensor.shape not in shapes:
            needed = " or ".join(map(str, shapes))
            self.fail(part, f"has shape {tensor.shape}, but the config needs {needed}")
        return tensor

    def integers(self) -> LazyTensor:
        """Of 4 bits."""
        (rows, columns), config = self.shape, self.config
        group = columns if config.group_size == -1 else config.group_size
        block = next((size for size in (128, 64, 32) if group % size == 0 and columns % group == 0), None)
        if block is None or (rows % _NIBBLES and config.method != "packed"):
            self.fail(
                _MARKS[config.method],
                f"is a matrix of {rows} rows and {columns} columns in groups of {config.group_size}; whole groups of a "
                f"multiple of 32 columns, and {_NIBBLES} rows, are needed",
            )
        read = {"gptq": self._gptq, "awq": self._awq, "packed": self._packed}[config.method](columns // group)
        name, repeats = f"{self.name}.weight", group // block

        def blocks(first: int, last: int) -> Bytes:
            scales, zeros = read.scales(first, last), read.zeros(first, last)
            minimums = None if config.is_symmetric else -scales * zeros
            if config.is_symmetric and np.any(zeros != _ZERO):
                raise LoadError(
                    f"{self.where}: {name!r} is said to be symmetric, but 8 does not stand for 0 in all of its groups; "
                    "set sym to false in quantization_config",
                    param="sym",
                )
            scales = np.repeat(scales, repeats, axis=1)
            minimums = None if minimums is None else np.repeat(minimums, repeats, axis=1)
            return four_bit_rows(read.integers(first, last), scales, minimums, name)

        return LazyTensor(name, GROUPED[block, config.is_symmetric], self.shape, blocks)

    def _gptq(self, groups: int) -> _Integers:
        rows, columns = self.shape
        words = _words(self.take("qweight", ("I32",), (columns // _NIBBLES, rows)))
        zeros = _words(self.take("qzeros", ("I32",), (groups, rows // _NIBBLES)))
        if self.config.stores_zero_minus_one:
            # Taken from whole words, so that what a zero of 0 borrows comes back.
            zeros = zeros + _ONES
        scales = self.take("scales", tuple(FORMATS), (groups, rows))
        if f"{self.name}.g_idx" in self.stored:
            given = np.frombuffer(self.take("g_idx", ("I32",), (columns,)).data, "<i4")
            # All of them 0: written by some for columns that are in order.
            if given.any() and not np.array_equal(given, np.arange(columns) // (columns // groups)):
                self.fail(
                    "g_idx",
                    "reorders the columns by activation (desc_act), which is not supported; use a file quantized "
                    "without it",
                )
        return _Integers(
            integers=lambda first, last: _nibbles(words[:, first:last].T),
            scales=lambda first, last: _floats(scales, columns=slice(first, last)).T,
            zeros=lambda first, last: _rows_of_words(zeros, first, last).T,
        )

    def _awq(self, groups: int) -> _Integers:
        rows, columns = self.shape
        words = _words(self.take("qweight", ("I32",), (columns, rows // _NIBBLES)))
        zeros = _words(self.take("qzeros", ("I32",), (groups, rows // _NIBBLES)))
        scales = self.take("scales", tuple(FORMATS), (groups, rows))
        return _Integers(
            integers=lambda first, last: _rows_of_words(words, first, last, _AWQ_ORDER).T,
            scales=lambda first, last: _floats(scales, columns=slice(first, last)).T,
            zeros=lambda first, last: _rows_of_words(zeros, first, last, _AWQ_ORDER).T,
        )

    def _packed(self, groups: int) -> _Integers:
        rows, columns = self.shape
        words = _words(self.take("weight_packed", ("I32",), (rows, columns // _NIBBLES)))
        scales = self.take("weight_scale", tuple(FORMATS), (rows, groups))
        if f"{self.name}.weight_g_idx" in self.stored:
            self.fail("weight_g_idx", "reorders the columns by activation, which is not supported")
        zeros = None
        if not self.config.is_symmetric:
            zeros = _words(self.take("weight_zero_point", ("I32",), (-(-rows // _NIBBLES), groups)))
        return _Integers(
            integers=lambda first, last: _nibbles(words[first:last]),
            scales=lambda first, last: _floats(scales, slice(first, last)),
            zeros=lambda first, last: (
                np.full((last - first, groups), _ZERO, np.uint8)
                if zeros is None
                else _rows_of_words(zeros.T, first, last).T
            ),
        )

    def floats(self) -> LazyTensor:
        """Of 8 bits."""
        rows, columns = self.shape
        weight = self.take("weight", ("F8_E4M3",), self.shape)
        if columns % 32:
            self.fail("weight", f"has {columns} columns of 8-bit floats; a multiple of 32 is supported")
        part = "weight_scale_inv" if f"{self.name}.weight_scale_inv" in self.stored else "weight_scale"
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        tall, wide = self.config.block or (1, columns)
        target: TensorFormat = "e4m3_row"
        if self.config.block is not None:
            shapes = [(-(-rows // tall), -(-columns // wide))]
            target = "e4m3_b128" if columns % 128 == 0 and wide % 128 == 0 else "e4m3_b32"
        scale = self.take(part, tuple(FORMATS), *shapes)
        if self.config.block is None:
            scale = replace(scale, shape=(math.prod(scale.shape), 1))
        is_one = scale.shape[0] == 1
        values = np.frombuffer(weight.data, np.uint8).reshape(self.shape)
        name, block = f"{self.name}.weight", BLOCKS[target][0]

        def blocks(first: int, last: int) -> Bytes:
            top = 0 if is_one else first // tall
            scales = _floats(scale, slice(top, 1 if is_one else -(-last // tall)))
            if not np.isfinite(scales).all() or np.any(values[first:last] & _NAN == _NAN):
                raise LoadError(f"{self.where}: {name!r} has values or scales that are not numbers", param=name)
            of_row = np.zeros(last - first, np.int64) if is_one else np.arange(first, last) // tall - top
            of_block = np.arange(0, columns, block) // wide
            return float_rows(values[first:last], scales[of_row][:, of_block])

        return LazyTensor(name, target, self.shape, blocks)


@dataclass(frozen=True, slots=True)
class _Integers:
    """How to read some rows [first, last) of a matrix."""

    integers: Callable[[int, int], Bytes]
    """(rows, columns)."""
    scales: Callable[[int, int], FloatArray]
    """(rows, groups)."""
    zeros: Callable[[int, int], Bytes]
    """(rows, groups)."""


def _words(tensor: StoredTensor) -> Words:
    return np.frombuffer(tensor.data, "<u4").reshape(tensor.shape)


def _floats(tensor: StoredTensor, rows: slice = slice(None), columns: slice = slice(None)) -> FloatArray:
    """Part of a plain matrix."""
    tensor_format = FORMATS[tensor.dtype]
    bits: npt.NDArray[np.generic] = np.frombuffer(tensor.data, f"<u{BLOCKS[tensor_format][1]}")
    part = np.ascontiguousarray(bits.reshape(tensor.shape)[rows, columns])
    return dequantize(RawTensor(tensor.name, tensor_format, part.shape, part.reshape(-1).data.cast("B")))


def _nibbles(words: Words) -> Bytes:
    """Those of each word along the last axis, from the lowest: eight times as many columns."""
    packed = np.ascontiguousarray(words, "<u4").view(np.uint8)
    out = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    out[..., 0::2], out[..., 1::2] = packed & 15, packed >> 4
    return out


def _rows_of_words(words: Words, first: int, last: int, order: tuple[int, ...] | None = None) -> Bytes:
    """Columns [first, last) of the integers, (rows of words, last - first), where a word is eight neighbours."""
    start = first // _NIBBLES
    found = _nibbles(words[:, start : -(-last // _NIBBLES)])
    if order is not None:
        found = found.reshape(len(found), -1, _NIBBLES)[:, :, list(order)].reshape(len(found), -1)
    return found[:, first - start * _NIBBLES : last - start * _NIBBLES]
