"""The memory that models are loaded into: the machine's, or its GPU's. Made by `app` for the worker's backend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from naru_worker.adapters import machine
from naru_worker.adapters.engine.loader import Memory

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool

HOST_SHARE, GPU_SHARE = 0.7, 0.9
"""Of the memory that there is, where no budget is set. The rest of a machine's is for the process itself and the page
cache, that of a GPU for the driver, compiled kernels and what libraries keep."""
RELEASE_INTERVAL_S = 10.0
"""Between two times that the allocator gives back what it keeps: every thread that allocates waits for it meanwhile."""


class ModelMemory(Memory, Protocol):
    """What loads ask, and the budget."""

    def default_budget_bytes(self) -> int:
        """For models, where the settings name no budget."""


class MachineMemory:
    """Of the CPU backends."""

    def __init__(self, num_ranks: int = 1) -> None:
        """`num_ranks`: processes that share it; all numbers are one's part."""
        self._num_ranks = num_ranks
        self._released_s = 0.0

    def default_budget_bytes(self) -> int:
        """A share of what the cgroup allows."""
        return int(HOST_SHARE * machine.memory_limit_bytes()) // self._num_ranks

    def available_bytes(self) -> int:
        """As cgroup and host tell."""
        return machine.memory_available_bytes() // self._num_ranks

    def release(self) -> None:
        """At most every `RELEASE_INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s - self._released_s >= RELEASE_INTERVAL_S:
            self._released_s = now_s
            machine.release_free_memory()


class GpuMemory:
    """Of the GPU. Opens it."""

    def __init__(self) -> None:
        """Raises LoadError where no GPU can be used; says why."""
        from naru_worker.adapters.ops.cuda.device import open_gpu

        self._gpu = open_gpu()

    def default_budget_bytes(self) -> int:
        """A share of the GPU's memory."""
        return int(GPU_SHARE * self._gpu.total_bytes)

    def available_bytes(self) -> int:
        """What the driver has left, and what torch's allocator keeps unused."""
        return self._gpu.available_bytes()

    def release(self) -> None:
        """Back to the driver, so that other processes on the GPU see it."""
        self._gpu.release()


def open_memory(backend: str, num_accelerators: int = 1) -> ModelMemory:
    """The memory of a backend's models: on one accelerator, of which others have as much.

    Raises:
        LoadError: it is a GPU's, and none can be used.
        ImportError: torch is not installed.
    """
    if backend != "cuda":
        return MachineMemory(num_accelerators)
    memory = GpuMemory()
    # Under Triton's interpreter the GPU is the machine.
    return memory if memory.default_budget_bytes() else MachineMemory(num_accelerators)


def open_sleep_slots(backend: str, num_bytes: int) -> PinnedPool | None:
    """Memory of the host, so many bytes of it, for weights that leave a GPU and are to come back soon.

    None where they do not come back from there: other backends' wait in the page cache.

    Raises:
        LoadError: the memory is a GPU's, and none can be used.
    """
    if backend != "cuda":
        return None
    from naru_worker.adapters.ops.cuda.device import SLOT_BYTES, open_gpu_memory
    from naru_worker.adapters.ops.cuda.memory import sleep_slots

    return sleep_slots.open_sleep_slots(open_gpu_memory(), num_bytes, SLOT_BYTES)
