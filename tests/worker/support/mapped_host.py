"""Memory of the host in a GPU's place, mapped chunk by chunk: what is unmapped is lost, and addresses stay.

The interpreter computes over it, so that a model whose weights were not brought back gives wrong answers, or crashes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from naru_worker.adapters.ops.cuda import device, runner
from naru_worker.adapters.ops.cuda.memory import device_view
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory
from naru_worker.adapters.ops.cuda.memory.driver import MemoryInfo
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory

CHUNK_BYTES = 4096


@dataclass
class MappedHost:
    """A `Driver` over the host's memory. Misuse is an AssertionError."""

    capacity_bytes: int = 1 << 30
    granularity: int = mmap.PAGESIZE
    device: int = 0
    calls: list[str] = field(default_factory=list)
    fails_in: int = 0
    """The n-th call from now fails, once; 0: none."""
    is_dead: bool = False
    """Failing calls are the device's; else `create` finds no room."""
    pins: list[int] = field(default_factory=list)
    """Bytes of each run of pages that was pinned."""
    pins_refused: bool = False
    _areas: dict[int, mmap.mmap] = field(default_factory=dict)
    _chunks: dict[int, int] = field(default_factory=dict)
    _mapped: dict[int, int] = field(default_factory=dict)
    _next_handle: int = 1

    @property
    def used_bytes(self) -> int:
        """Of all chunks there are."""
        return sum(self._chunks.values())

    @property
    def num_ranges(self) -> int:
        """Ranges that are reserved."""
        return len(self._areas)

    def reserve(self, num_bytes: int) -> int:
        self._call("reserve")
        area = mmap.mmap(-1, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._areas[address] = area
        return address

    def free_range(self, address: int, num_bytes: int) -> None:
        self._call("free_range")
        assert not any(address <= at < address + num_bytes for at in self._mapped), "chunks are mapped into the range"
        # Tensors over it may still be alive, as dead ones of a GPU are.
        del self._areas[address]

    def create(self, num_bytes: int) -> int:
        self._call("create")
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise OutOfDeviceMemory(num_bytes, "there is no more")
        self._next_handle += 1
        self._chunks[self._next_handle] = num_bytes
        return self._next_handle

    def destroy(self, handle: int) -> None:
        self._call("destroy")
        assert handle not in self._mapped.values()
        del self._chunks[handle]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("map")
        assert address not in self._mapped and handle not in self._mapped.values()
        self._mapped[address] = handle
        ctypes.memset(address, 0xA5, num_bytes)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("set_access")

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("unmap")
        del self._mapped[address]
        ctypes.memset(address, 0x5A, num_bytes)

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.capacity_bytes - self.used_bytes, self.capacity_bytes)

    def pin(self, host_address: int, num_bytes: int) -> None:
        if self.pins_refused:
            raise DeviceError("cuMemHostRegister", "CUDA_ERROR_NOT_PERMITTED")
        self.pins.append(num_bytes)

    def copy_to_host(self, host_address: int, address: int, num_bytes: int) -> None:
        self._call("copy_to_host")
        ctypes.memmove(host_address, address, num_bytes)

    def copy_to_device(self, address: int, host_address: int, num_bytes: int) -> None:
        self._call("copy_to_device")
        ctypes.memmove(address, host_address, num_bytes)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        is_due = self.fails_in == 1
        self.fails_in = max(0, self.fails_in - 1)
        if not is_due:
            return
        if name == "create" and not self.is_dead:
            raise OutOfDeviceMemory(CHUNK_BYTES, "the test wants it so")
        raise DeviceError(name, "CUDA_ERROR_UNKNOWN")


def map_host(patch: pytest.MonkeyPatch, host: MappedHost, budget_bytes: int = 1 << 30) -> DeviceMemory:
    """Has runners of this process take their memory from `host`."""
    memory = DeviceMemory("cpu", ChunkPool(host, budget_bytes, chunk_bytes=CHUNK_BYTES), "")

    def tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype, device: int, owner: object) -> torch.Tensor:
        num_bytes = device_view.tensor_bytes(shape, dtype)
        raw = (ctypes.c_uint8 * num_bytes).from_address(address)
        view = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(*shape)
        view.__dict__["owner"] = owner
        return view

    patch.setattr(device_view, "tensor_at", tensor_at)
    for module in (device, runner):
        patch.setattr(module, "open_gpu_memory", lambda: memory)
    return memory
