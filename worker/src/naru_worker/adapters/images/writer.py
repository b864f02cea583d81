"""Writes an image into a file that has its full size already. Runs in the packing process.

Weights go from the mapped source to the file in pieces, so that memory stays small however large the model is. Does not
reserve space, name files or make anything durable beyond the file itself: that is the store's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.images.header import (
    CHUNK_BYTES,
    PAGE_BYTES,
    ImageHeader,
    digest_of,
    sums_bytes,
)
from naru_worker.adapters.images.image_index import ImageIndex, IndexedMatrix
from naru_worker.adapters.ops import native_memory
from naru_worker.adapters.ops.cpu_pack import float_vector, stacked_bias
from naru_worker.adapters.ops.cpu_transcode import native_tensor
from naru_worker.adapters.ops.weights_image import SegmentPlace
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.tensor_format import row_bytes

_PANEL_ROWS = 16
_WINDOW_BYTES = 4 * 2**20
"""Written at once, and at a multiple of it: the kernel then keeps the file in huge pages. In small ones decoding
is up to 7 % slower, and each load has 25 times as many pages to map. Weights are packed right into the window; it stays
in the cache on the way to the file, and is a step of progress."""


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """Everything but the weights' numbers."""

    index: ImageIndex
    index_json: bytes
    tokenizer: bytes

    @property
    def weights_end(self) -> int:
        """Where the tokenizer begins."""
        return self.index.stage_ends[-1]

    @property
    def file_bytes(self) -> int:
        """Of the whole image."""
        return self.weights_end + len(self.tokenizer) + sums_bytes(self.weights_end) + len(self.index_json)


class ImageWriter:
    """Writes one image. The file is all zeros when it begins."""

    def __init__(
        self, library: ctypes.CDLL, descriptor: int, planned: PlannedImage, on_progress: Callable[[int, int], None]
    ) -> None:
        """`on_progress` gets the bytes written and those of the whole file."""
        self._library = library
        self._descriptor = descriptor
        self._planned = planned
        self._on_progress = on_progress
        self._num_done = 0
        self._window = np.empty(_WINDOW_BYTES, np.uint8)
        self._base = 0
        """Offset of the window in the file."""
        self._first = 0
        self._end = 0
        """Bytes [first, end) of the window are to be written; what lies behind them is of another place."""

    def write(self, checkpoint: Checkpoint) -> None:
        """Writes all sections and waits until they are on the disk.

        Raises:
            LoadError: a tensor does not fit, or the source changed while it was read.
            OSError: the disk refuses.
        """
        planned = self._planned
        for name, place in planned.index.vectors.items():
            values = float_vector(checkpoint.get(name))
            if len(values) != place.length:
                raise LoadError(f"tensor {name!r} has {len(values)} values; {place.length} were there before")
            self._put(values.tobytes(), place.offset)
        for matrix in planned.index.matrices:
            self._write_matrix(checkpoint, matrix)
        self._put(planned.tokenizer, planned.weights_end)
        self._flush()
        sums = self._sums()
        header = ImageHeader(
            weights_end=planned.weights_end,
            tokenizer_bytes=len(planned.tokenizer),
            index_bytes=len(planned.index_json),
            sums_hash=digest_of(sums),
            index_hash=digest_of(planned.index_json),
        )
        self._put(sums, header.sums_offset)
        self._put(planned.index_json, header.index_offset)
        self._put(header.to_page(), 0)
        self._flush()
        os.fsync(self._descriptor)
        self._on_progress(planned.file_bytes, planned.file_bytes)

    def _write_matrix(self, checkpoint: Checkpoint, matrix: IndexedMatrix) -> None:
        parts = [native_tensor(checkpoint.get(name)) for name in matrix.names]
        for part, segment in zip(parts, matrix.place.segments, strict=True):
            self._write_segment(
                np.frombuffer(part.data, np.uint8), segment, row_bytes(part.format, part.shape[1]), matrix
            )
        if matrix.place.bias_offset >= 0:
            names = [f"{name}_bias" for name in matrix.names]
            bias = stacked_bias(parts, [checkpoint.get(n) if n in matrix.biases else None for n in names])
            assert bias is not None, "the plan has a bias"
            self._put(bias.tobytes(), matrix.place.bias_offset)

    def _write_segment(
        self,
        data: npt.NDArray[np.uint8],
        segment: SegmentPlace,
        stride: int,
        matrix: IndexedMatrix,
    ) -> None:
        """Panels are independent of one another, and follow one another."""
        columns = matrix.place.num_columns
        panel = int(self._library.naru_segment_bytes(segment.format, 1, columns))
        row, offset = 0, segment.offset
        while row < segment.num_rows:
            num_left = -(-(segment.num_rows - row) // _PANEL_ROWS)
            num_fit = min(self._room(offset) // panel, num_left)
            # A panel that does not fit lies in two windows.
            out = self._take(offset, num_fit * panel) if num_fit else np.empty(panel, np.uint8)
            # Rows and columns that the last panel does not have stay zeros.
            out.fill(0)
            rows = min(max(num_fit, 1) * _PANEL_ROWS, segment.num_rows - row)
            source = data[row * stride : (row + rows) * stride]
            self._library.naru_pack_segment(segment.format, rows, columns, source.ctypes.data, out.ctypes.data)
            if not num_fit:
                self._put(out.data, offset)
            row, offset = row + rows, offset + len(out)

    def _sums(self) -> bytes:
        """Of what the file now holds, padding included."""
        end = self._planned.weights_end
        if end == PAGE_BYTES:
            return b""
        assert native_memory.CHUNK_BYTES == CHUNK_BYTES, "the format's chunk is the native one"
        with mmap.mmap(self._descriptor, end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            sums = native_memory.sum_chunks(int(view.ctypes.data) + PAGE_BYTES, end - PAGE_BYTES)
            del view
        return sums.tobytes()

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        """Sections come in ascending order, but for the header."""
        left = np.frombuffer(data, np.uint8)
        while len(left):
            count = min(len(left), self._room(offset))
            self._take(offset, count)[:] = left[:count]
            left, offset = left[count:], offset + count

    def _room(self, offset: int) -> int:
        """Bytes of the file's window from the offset on."""
        return _WINDOW_BYTES - offset % _WINDOW_BYTES

    def _take(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The part of the window that goes to the offset, to be filled; not more than its room."""
        start = offset % _WINDOW_BYTES
        if offset - start != self._base or start < self._end:
            self._flush()
            self._base = offset - start
        if not self._end:
            self._first = start
        else:
            # Padding: the file holds zeros there.
            self._window[self._end : start].fill(0)
        self._end = start + num_bytes
        return self._window[start : self._end]

    def _flush(self) -> None:
        left = self._window[self._first : self._end].data
        offset = self._base + self._first
        while left:
            written = os.pwrite(self._descriptor, left, offset)
            left, offset = left[written:], offset + written
        self._num_done += self._end - self._first
        self._first = self._end = 0
        self._on_progress(min(self._num_done, self._planned.file_bytes), self._planned.file_bytes)
