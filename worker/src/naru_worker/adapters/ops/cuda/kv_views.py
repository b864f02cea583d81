"""A model's KV cache on the device: blocks of all layers in a row, and each layer's part of them as tensors.

A block holds, layer after layer, keys of its tokens and then values; behind all of them, where elements are bytes, the
scales in the same order. So a block is one piece of memory, whatever the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from naru_worker.adapters.ops.protocol import KVConfig, KVFormat

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values: (num_blocks, block_size, num_kv_heads, head_dim), last stride 1."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    """(num_blocks, block_size, num_kv_heads) float32, of a cache of bytes."""
    value_scales: Tensor | None


def element_type(kv_format: KVFormat, activation_dtype: torch.dtype) -> torch.dtype:
    """Of the cache. Sixteen bits are the activations' own, where those have sixteen."""
    if kv_format == "int8":
        return torch.int8
    if kv_format == "f32":
        return torch.float32
    return activation_dtype if activation_dtype.itemsize == 2 else torch.float16


def block_bytes(kv: KVConfig, dtype: torch.dtype) -> int:
    """Of one block over all layers, scales included; a multiple of 16."""
    return _value_bytes(kv, dtype) + _scale_bytes(kv, dtype)


def layer_caches(blocks: Tensor, kv: KVConfig, dtype: torch.dtype) -> list[LayerCache]:
    """Views of each layer's part.

    Args:
        blocks: (num_blocks, block_bytes) uint8, contiguous.
        kv: Geometry.
        dtype: Of the elements.
    """
    shape = (kv.num_layers, 2, kv.block_size, kv.num_kv_heads, kv.head_dim)
    elements = blocks[:, : math.prod(shape) * dtype.itemsize].view(dtype).view(len(blocks), *shape)
    if dtype != torch.int8:
        return [LayerCache(elements[:, i, 0], elements[:, i, 1], None, None) for i in range(kv.num_layers)]
    first = _value_bytes(kv, dtype)
    scales = blocks[:, first : first + math.prod(shape[:-1]) * _SCALE_BYTES].view(torch.float32)
    scales = scales.view(len(blocks), *shape[:-1])
    return [
        LayerCache(elements[:, i, 0], elements[:, i, 1], scales[:, i, 0], scales[:, i, 1]) for i in range(kv.num_layers)
    ]


def _value_bytes(kv: KVConfig, dtype: torch.dtype) -> int:
    return _rounded(2 * kv.num_layers * kv.block_size * kv.num_kv_heads * kv.head_dim * dtype.itemsize)


def _scale_bytes(kv: KVConfig, dtype: torch.dtype) -> int:
    if dtype != torch.int8:
        return 0
    return _rounded(2 * kv.num_layers * kv.block_size * kv.num_kv_heads * _SCALE_BYTES)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
