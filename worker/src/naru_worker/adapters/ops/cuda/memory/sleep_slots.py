"""Pinned memory for weights that wait in host memory: reserved when a worker starts, pinned beside its first work."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading

import numpy as np

from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory
from naru_worker.adapters.ops.cuda.memory.driver import Driver
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError
from naru_worker.adapters.ops.cuda.memory.pinned_pool import ByteArray, PinnedPool

_log = logging.getLogger(__name__)

_PINNED_AT_ONCE_BYTES = 1 << 30
"""Some tenths of a second: what is pinned can be used while the rest is."""


def open_sleep_slots(memory: DeviceMemory, num_bytes: int, slot_bytes: int) -> PinnedPool | None:
    """Slots of so many bytes in all; None where models cannot sleep, or not even one slot fits.

    They come one after the other, as they are pinned. Where the system refuses that, ordinary memory stands in: it
    serves as well, and is copied at about half the speed.
    """
    num_slots = num_bytes // slot_bytes
    if memory.pool is None or num_slots < 1:
        return None
    try:
        area = mmap.mmap(-1, num_slots * slot_bytes)
    except OSError as exc:
        _log.warning("no model waits in host memory: %d bytes are not to be had (%s)", num_bytes, exc.strerror)
        return None
    with contextlib.suppress(OSError):  # a system without them pins more slowly
        area.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(area, np.uint8)
    pool = PinnedPool(buffer, slot_bytes, num_ready=0)
    work = (memory.pool.driver, pool, buffer)
    threading.Thread(target=_pin, args=work, name="pin", daemon=True).start()
    return pool


def _pin(driver: Driver, pool: PinnedPool, buffer: ByteArray) -> None:
    count = max(1, _PINNED_AT_ONCE_BYTES // pool.slot_bytes)
    for first in range(0, pool.num_slots, count):
        num_slots = min(count, pool.num_slots - first)
        try:
            driver.pin(buffer.ctypes.data + first * pool.slot_bytes, num_slots * pool.slot_bytes)
        except DeviceError as exc:
            _log.warning(
                "host memory cannot be pinned beyond %d of %d bytes (%s): weights that wait there come back more "
                "slowly; raise the limit of locked memory (ulimit -l), or lower host_budget_bytes",
                first * pool.slot_bytes,
                len(buffer),
                exc.message,
            )
            pool.add_ready(pool.num_slots - first)
            return
        pool.add_ready(num_slots)
