"""Brings mapped weights into memory and compares their sums, in pieces that can be stopped.

Used by `ModelImage.make_present`. The work itself is native and runs without the interpreter's lock.
"""

from __future__ import annotations

import threading

import numpy as np

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import ImageDamaged, LoadStopped
from naru_worker.adapters.images.header import CHUNK_BYTES, PAGE_BYTES
from naru_worker.adapters.images.mapped_image import MappedImage
from naru_worker.adapters.ops import native_memory

PIECE_BYTES = 256 * CHUNK_BYTES
"""16 MiB: some milliseconds of reading from memory, and what a stop waits for at most."""


def make_range_present(image: MappedImage, start: int, stop: int, verify: bool, should_stop: threading.Event) -> None:
    """Reads [start, stop), piece by piece; `start` is the first byte of a chunk of sums.

    Raises:
        ImageDamaged: a sum is not what it was when the image was packed, or a page cannot be read.
        LoadStopped: it was told to stop.
    """
    assert (start - PAGE_BYTES) % CHUNK_BYTES == 0, "sums are of whole chunks"
    for at in range(start, stop, PIECE_BYTES):
        if should_stop.is_set():
            raise LoadStopped(f"{image.path}: the load was told to stop")
        end = min(at + PIECE_BYTES, stop)
        try:
            if verify:
                _compare(image, at, end)
            else:
                native_memory.populate(image.address + at, end - at)
        except ImageDamaged:
            raise
        except LoadError as e:
            raise ImageDamaged(f"{image.path}: bytes {at} to {end}: {e.message}; remove the image") from e


def _compare(image: MappedImage, start: int, stop: int) -> None:
    sums = native_memory.sum_chunks(image.address + start, stop - start)
    first = (start - PAGE_BYTES) // CHUNK_BYTES
    wrong = np.flatnonzero(sums != image.sums[first : first + len(sums)])
    if len(wrong):
        chunk = first + int(wrong[0])
        at = PAGE_BYTES + chunk * CHUNK_BYTES
        raise ImageDamaged(
            f"{image.path}: chunk {chunk} of the weights (bytes {at} to {min(at + CHUNK_BYTES, stop)}) is damaged; "
            "remove the image"
        )
