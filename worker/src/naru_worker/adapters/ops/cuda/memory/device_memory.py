"""The memory of one device as a process uses it: mapped on demand where that can be, else fixed buffers, and why."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from naru_worker.adapters.ops.cuda.memory.arena import MappedArena
from naru_worker.adapters.ops.cuda.memory.chunk_pool import CHUNK_BYTES, ChunkPool
from naru_worker.adapters.ops.cuda.memory.cuda_driver import CudaDriver
from naru_worker.adapters.ops.cuda.memory.device_arena import DeviceArena
from naru_worker.adapters.ops.cuda.memory.driver import Driver
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, VirtualMemoryUnsupported
from naru_worker.adapters.ops.cuda.memory.fixed_arena import FixedArena

_log = logging.getLogger(__name__)


class DeviceMemory:
    """Made once in a process for each device; thread-safe. All models' arenas come from here."""

    def __init__(self, device: str, pool: ChunkPool | None, reason: str) -> None:
        """Without a pool arenas are fixed buffers on `device`, for this reason."""
        self.device = device
        self.pool = pool
        self.reason = reason
        """Empty, or why arenas are fixed buffers."""

    def make_arena(self, num_bytes: int) -> DeviceArena:
        """A new range of so many bytes.

        Raises:
            OutOfDeviceMemory: a fixed buffer of this size does not fit.
            DeviceError: the device refused.
        """
        if self.pool is None:
            return FixedArena(num_bytes, self.device, self.reason)
        return MappedArena(self.pool, num_bytes)

    def trim(self) -> int:
        """Gives what no arena has back to the device, for others to use; returns the bytes."""
        return 0 if self.pool is None else self.pool.trim()


def open_device_memory(
    device: str,
    budget_bytes: int,
    make_driver: Callable[[int], Driver] = CudaDriver,
    make_room: Callable[[], object] | None = None,
) -> DeviceMemory:
    """The memory of ``cpu``, ``cuda`` (the first GPU) or ``cuda:N``, of which all arenas together take `budget_bytes`
    at most. `make_room`: see `ChunkPool`.

    Raises:
        ValueError: no such name of a device, or a budget below 0.
    """
    if device == "cpu":
        return DeviceMemory(device, None, "the CPU's memory is not mapped through CUDA")
    match = re.fullmatch(r"cuda(?::(\d+))?", device, re.ASCII)
    if match is None:
        raise ValueError(f"the device is {device!r}; cpu, cuda or cuda:N is needed")
    try:
        driver = make_driver(int(match[1] or "0"))
    except (VirtualMemoryUnsupported, DeviceError) as exc:
        _log.warning("memory of %s is taken in fixed buffers: %s", device, exc.message)
        return DeviceMemory(device, None, exc.message)
    chunk_bytes = -(-CHUNK_BYTES // driver.granularity) * driver.granularity
    return DeviceMemory(device, ChunkPool(driver, budget_bytes, chunk_bytes=chunk_bytes, make_room=make_room), "")
