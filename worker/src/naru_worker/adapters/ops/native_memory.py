"""Mapped memory at the speed of the machine: bringing pages in and summing them, without the interpreter's lock.

Called by whoever maps packed images. Knows nothing of what lies in them.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.native_lib import load_best

CHUNK_BYTES = 64 * 1024
"""One sum stands for a piece of this size."""


def sum_chunks(address: int, num_bytes: int) -> npt.NDArray[np.uint64]:
    """One sum for each 64 KiB, (ceil(num_bytes / 64 KiB),): 64-bit little-endian words, modulo 2**64.

    Brings the pages in on the way. The last word counts as padded with zeros. The caller keeps the memory mapped.

    Raises:
        LoadError: the pages cannot be read: the file behind them has become shorter, or the disk fails.
    """
    sums = np.empty(-(-num_bytes // CHUNK_BYTES), np.uint64)
    _fault_in(address, num_bytes, sums.ctypes.data)
    return sums


def populate(address: int, num_bytes: int) -> None:
    """Brings the pages of [address, address + num_bytes) in, so that reading them never waits for the disk.

    Raises:
        LoadError: see `sum_chunks`.
    """
    _fault_in(address, num_bytes, None)


def is_resident(address: int, num_bytes: int) -> bool:
    """Whether the system has all pages in memory already, so that bringing them in means mapping them only.

    False as well where it will not say. `address` is that of a page.
    """
    pages = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages)
    return found == 0 and all(page & 1 for page in set(pages.raw))


def _fault_in(address: int, num_bytes: int, sums: int | None) -> None:
    if load_best().naru_fault_in(address, num_bytes, sums, CHUNK_BYTES) != 0:
        raise LoadError(
            f"{num_bytes} mapped bytes cannot be read; the file behind them was cut short, or its disk fails"
        )
