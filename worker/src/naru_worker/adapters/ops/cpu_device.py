"""The CPU as models share it: the kernels, one pool of threads and one workspace for activations, per process.

Called when a runner is made. Steps of all models run here, one after the other; a model's weights and KV cache are its
own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass

from naru_proto.errors import LoadError
from naru_worker.adapters.cores import cpu_quota
from naru_worker.adapters.ops.native_lib import best_isa, load_variant

_MAX_THREADS_PER_CPU = 4
_FRUGAL_SPIN_CYCLES = 5000
"""About 2 us: a quota counts spinning as work, and what is spent on it is missing at the end of the period."""


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """Lives until the process ends: its threads sleep when there is nothing to compute."""

    library: ctypes.CDLL
    handle: int
    """Of the native device."""
    num_threads: int


def effective_threads(num_threads: int) -> int:
    """How many threads a device has when so many are asked for: a few per CPU at most.

    Raises:
        LoadError: the number is out of range.
    """
    if not 1 <= num_threads <= 1024:
        raise LoadError(f"num_threads is {num_threads!r}, which the cpu backend cannot serve (from 1 to 1024)")
    return min(num_threads, _MAX_THREADS_PER_CPU * (os.cpu_count() or 1))


class _Devices:
    """One device per instruction set and number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[tuple[str, int], CpuDevice] = {}

    def get(self, variant: str, num_threads: int) -> CpuDevice:
        with self._lock:
            key = (variant, num_threads)
            if key not in self._devices:
                library = load_variant(variant)
                handle = library.naru_device_new(num_threads)
                if not handle:
                    raise LoadError("no address space for activations; raise the process's limit (ulimit -v)")
                if cpu_quota() is not None:
                    library.naru_device_spin(handle, _FRUGAL_SPIN_CYCLES)
                self._devices[key] = CpuDevice(library, handle, num_threads)
            return self._devices[key]


_DEVICES = _Devices()


def open_device(num_threads: int, variant: str | None = None) -> CpuDevice:
    """The process's device of that many threads, made at the first call. Any thread.

    `variant` picks an instruction set by name, for tests; None takes the best.

    Raises:
        LoadError: the kernels cannot be built or run here, or the number of threads is out of range.
    """
    return _DEVICES.get(best_isa() if variant is None else variant, effective_threads(num_threads))
