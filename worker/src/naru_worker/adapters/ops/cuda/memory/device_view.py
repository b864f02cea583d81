"""Torch tensors over addresses that torch's allocator knows nothing of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


class _DeviceBytes:
    """Bytes on a GPU, as the CUDA array interface tells of them; torch keeps it alive as long as its tensor."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "strides": None,
            # Bytes: the interface has no name for bfloat16 and float8.
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: int, owner: object) -> torch.Tensor:
    """A contiguous tensor at an address of a GPU, which must have memory behind it; keeps `owner` alive."""
    raw = torch.as_tensor(_DeviceBytes(address, tensor_bytes(shape, dtype), owner), device=f"cuda:{device}")
    return raw.view(dtype).view(*shape)


def tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return dtype.itemsize * math.prod(shape)
