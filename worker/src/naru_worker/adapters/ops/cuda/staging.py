"""Many small arrays to the device in one copy, through pinned buffers that take turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.streams import Event, Streams, open_streams

_ALIGNMENT_BYTES = 16
FIRST_BYTES = 64 * 1024
NUM_HOST_BUFFERS = 3
"""One is filled, one is copied from, and one was just copied from: filling seldom waits."""


@dataclass(slots=True)
class _HostBuffer:
    memory: Tensor
    copied: Event | None = None
    """When its last copy was done."""


class Staging:
    """Pinned buffers on the host and their one twin on the device; all grow to what a step needs, and stay.

    Mutable, for one thread. What `put` and `put_bytes` returned is overwritten by the next call, in the order of the
    stream of computation: work that was submitted before still reads what it should. While nothing grows, arrays of
    the same shapes land at the same addresses, so that a graph may read them.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, num_bytes: int = FIRST_BYTES) -> None:
        """`streams`: None: the device's. `num_bytes`: of each buffer at first."""
        self._device = device
        self._streams = open_streams(device) if streams is None else streams
        self._buffers = [_HostBuffer(self._streams.host_buffer(num_bytes)) for _ in range(NUM_HOST_BUFFERS)]
        self._next = 0
        self._twin = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def put(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Tensors on the device of the same types and shapes, by name. The arrays may change after the call."""
        places, end = _places(arrays)
        buffer = self._free_buffer(end)
        on_host = buffer.memory.numpy()
        for name, array in arrays.items():
            raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            on_host[places[name] : places[name] + len(raw)] = raw
        self._upload(buffer, slice(0, end))
        return {name: self._view(places[name], array) for name, array in arrays.items()}

    def begin(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A buffer of at least so many bytes to be filled, and then given to `finish`, before any other call."""
        return np.asarray(self._free_buffer(num_bytes).memory.numpy())

    def finish(self, num_bytes: int, part: slice | None = None) -> Tensor:
        """Sends what was filled in; (num_bytes,) uint8 on the device.

        `part`: of these bytes only, in a buffer of the size of the last one; the others stay as they were.
        """
        self._upload(self._buffers[self._next], slice(0, num_bytes) if part is None else part)
        return self._twin[:num_bytes]

    def _free_buffer(self, num_bytes: int) -> _HostBuffer:
        if num_bytes > len(self._twin):
            self._twin = torch.empty(grown_bytes(num_bytes), dtype=torch.uint8, device=self._device)
        buffer = self._buffers[self._next]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if num_bytes > len(buffer.memory):
            buffer.memory = self._streams.host_buffer(grown_bytes(num_bytes))
        return buffer

    def _upload(self, buffer: _HostBuffer, part: slice) -> None:
        self._streams.compute.upload(buffer.memory[part], self._twin[part])
        buffer.copied = self._streams.compute.record()
        self._next = (self._next + 1) % NUM_HOST_BUFFERS

    def _view(self, place: int, array: npt.NDArray[Any]) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._twin[place : place + array.nbytes].view(dtype).view(array.shape)


def grown_bytes(num_bytes: int) -> int:
    """What a buffer has that was once asked for so many bytes."""
    return FIRST_BYTES if num_bytes <= FIRST_BYTES else 2 * num_bytes


def _places(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[str, int], int]:
    places: dict[str, int] = {}
    end = 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, end
