"""Attention of prompt tokens alone, over a cache that the test fills; and what numpy says of it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.cpu_batch import address
from naru_worker.adapters.ops.cpu_device import open_device
from naru_worker.adapters.ops.native_lib import ModelSpec, load_variant

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """Heads, their size, and how the cache is cut."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    kv_format: str = "f16"


class PromptAttention:
    """A cache of random keys and values of one sequence; slots that no token has hold NaN."""

    def __init__(self, variant: str, shape: Shape, length: int, num_threads: int = 1, spread: float = 1.0) -> None:
        self.shape = shape
        self._library = load_variant(variant)
        rng = np.random.default_rng(length)
        blocks = -(-length // shape.block_size)
        self.table = (rng.permutation(blocks) + 1).astype(np.int32)
        dtype: Any = np.float16 if shape.kv_format == "f16" else np.float32
        size = (shape.num_kv_heads, length, shape.head_dim)
        self.keys = (rng.standard_normal(size) * spread).astype(dtype)
        self.values = rng.standard_normal(size).astype(dtype)
        spec = ModelSpec(
            0, 1, shape.num_heads, shape.num_kv_heads, shape.head_dim, 16, shape.block_size, blocks + 1,
            dtype().itemsize, 512, 1, blocks * shape.block_size, num_threads, 0, 1.0,
        )  # fmt: skip
        self._device = open_device(num_threads, variant)
        self._model = self._library.naru_model_new(self._device.handle, ctypes.byref(spec), None)
        assert self._model
        self.refill()

    def close(self) -> None:
        """Gives the cache back."""
        self._library.naru_model_free(self._model)

    def refill(self) -> None:
        """Writes the keys and values to the cache."""
        shape, dtype, num_blocks = self.shape, self.keys.dtype.type, len(self.table) + 1
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.block_size
        padded = -(-dim // 16) * 16
        count = heads * size * (dim + padded)
        whole = (ctypes.c_uint8 * (num_blocks * count * dtype().itemsize)).from_address(
            self._library.naru_kv_base(self._model)
        )
        cache = np.frombuffer(whole, dtype).reshape(num_blocks, count)
        cache[:] = np.nan
        for index, block in enumerate(self.table):
            of_heads = cache[block].reshape(heads, size * (dim + padded))
            keys = of_heads[:, : dim * size].reshape(heads, dim, size)
            values = of_heads[:, dim * size :].reshape(heads, size, padded)
            part = self.keys[:, index * size : (index + 1) * size]
            keys[:, :, : part.shape[1]] = part.transpose(0, 2, 1)
            values[:, : part.shape[1], :dim] = self.values[:, index * size : (index + 1) * size]
            values[:, : part.shape[1], dim:] = 0

    def run(self, q: FloatArray, position: int, window: int = 0, repeats: int = 1) -> FloatArray:
        """(M, num_heads * head_dim) for as many queries from `position` on."""
        out = np.full_like(q, np.nan)
        scale = self.shape.head_dim**-0.5
        done = self._library.naru_attend_prompt(
            self._model, address(q), len(q), position, window, address(self.table), scale, address(out), repeats
        )
        assert done == 0
        return out

    def expected(self, q: FloatArray, position: int, window: int = 0) -> npt.NDArray[np.float64]:
        """The same in double precision."""
        shape = self.shape
        group, end = shape.num_heads // shape.num_kv_heads, position + len(q)
        k = np.repeat(self.keys[:, :end].astype(np.float64), group, axis=0)
        v = np.repeat(self.values[:, :end].astype(np.float64), group, axis=0)
        rows = q.astype(np.float64).reshape(len(q), shape.num_heads, shape.head_dim)
        scores = np.einsum("thd,hsd->hts", rows, k) * shape.head_dim**-0.5
        distance = np.arange(position, end)[:, None] - np.arange(end)[None]
        scores = np.where((distance < 0) | (distance >= (window or end)), -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result: npt.NDArray[np.float64] = np.einsum("hts,hsd->thd", weights, v).reshape(q.shape)
        return result


def queries(shape: Shape, count: int, seed: int = 0) -> FloatArray:
    """Random rows of all heads."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, shape.num_heads * shape.head_dim)).astype(np.float32)
