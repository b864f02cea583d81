"""Many small arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
_FIRST_BYTES = 64 * 1024


class Staging:
    """A pinned buffer on the host and its twin on the device; both grow to what a step needs, and stay.

    Mutable, for one thread. What `put` returned is void at the next `put`: the step that reads it must be over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(_FIRST_BYTES)

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Tensors on the device of the same types and shapes, by name. The copy is asynchronous, in stream order."""
        places: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if end > len(self._host):
            self._grow(2 * end)
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            self._bytes[places[name] : places[name] + len(raw)] = raw
        self._twin[:end].copy_(self._host[:end], non_blocking=True)
        return {name: self._view(places[name], array) for name, array in arrays.items()}

    def _view(self, place: int, array: npt.NDArray[Any]) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._twin[place : place + array.nbytes].view(dtype).view(array.shape)

    def _grow(self, num_bytes: int) -> None:
        is_gpu = self._device.type == "cuda"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._bytes = self._host.numpy()
        self._twin = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
