"""The block tables of a model's sequences on the device: a step sends the cells that are not there yet.

A table grows by a block in 16 tokens or so, while whole tables of 256 sequences of 8192 tokens are half a megabyte a
step. Each sequence has a line of its own, wherever it stands in the batch, so that lines stay when others end.
"""

from __future__ import annotations

import numpy as np
import torch

from naru_proto.errors import InternalError
from naru_worker.adapters.ops.cuda.kernels.table_cells import write_cells
from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.streams import Streams
from naru_worker.adapters.ops.protocol import BatchInputs, Int32Array, TableLines


class TableTwin:
    """Block tables on the device, and on the host what they will be once all that was submitted has run.

    Mutable, for one thread. The tensor stays where it is, so that graphs may read it; it changes in the order of the
    stream of computation.
    """

    def __init__(
        self, device: torch.device, streams: Streams, num_lines: int, max_model_len: int, block_size: int
    ) -> None:
        """Room for `num_lines` sequences.

        Raises:
            ValueError: the table has more cells than a kernel can count.
        """
        self.num_cells_sent = 0
        """Of all steps."""
        self._block_size = block_size
        self._streams = streams
        shape = (num_lines, -(-max_model_len // block_size))
        if shape[0] * shape[1] >= 1 << 31:
            raise ValueError(f"{num_lines} sequences of {max_model_len} tokens have too many blocks for one table")
        self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        """(num_lines, blocks) int32."""
        self._host = np.zeros(shape, np.int32)
        self._owner: object = None
        self._stamps = np.zeros(num_lines, np.int64)  # of each line's newest look; 0: never, or nobody's
        self._widths = np.zeros(num_lines, np.int32)  # columns that were looked at then
        self._staging = Staging(device, streams)

    def take(self, batch: BatchInputs, num_sequences: int) -> Int32Array:
        """Has the tables of the first sequences of a batch there for work that is submitted after it.

        Returns their lines, (num_sequences,), valid as long as the batch's own arrays.

        Raises:
            InternalError: more sequences, or longer ones, than there is room for.
        """
        if not num_sequences:
            return np.zeros(0, np.int32)
        known = batch.table_lines
        lines = np.arange(num_sequences, dtype=np.int32) if known is None else known.lines[:num_sequences]
        needed = -(-batch.seq_lens[:num_sequences] // self._block_size)
        if num_sequences > len(self._host) or int(needed.max()) > self._host.shape[1]:
            raise InternalError(
                f"{num_sequences} sequences of up to {int(needed.max())} blocks; there is room for {self._host.shape}"
            )
        rows = self._rows_to_look_at(known, lines, needed)
        if len(rows):
            # One more: it often has its block before its tokens.
            width = min(int(needed[rows].max()) + 1, self._host.shape[1], batch.block_table.shape[1])
            self._send(batch.block_table[rows, :width], lines[rows])
            self._stamps[lines[rows]] = 0 if known is None else known.stamps[rows]
            self._widths[lines[rows]] = width
        return lines

    def _rows_to_look_at(self, known: TableLines | None, lines: Int32Array, needed: Int32Array) -> Int32Array:
        if known is None:
            return np.arange(len(lines), dtype=np.int32)
        if known.owner is not self._owner:
            self._owner = known.owner
            self._stamps[:] = 0
        is_new = self._stamps[lines] != known.stamps[: len(lines)]
        is_new |= self._widths[lines] < needed
        return np.flatnonzero(is_new).astype(np.int32)

    def _send(self, tables: Int32Array, lines: Int32Array) -> None:
        """What differs from what will be there. The host's copy changes last: what could not be sent is sent again."""
        width = tables.shape[1]
        rows, columns = np.nonzero(tables != self._host[lines, :width])
        if not len(rows):
            return
        cells = np.empty((2, len(rows)), np.int32)
        cells[0] = lines[rows] * self._host.shape[1] + columns
        cells[1] = tables[rows, columns]
        placed = self._staging.put({"cells": cells})["cells"]
        self._streams.compute.submit(lambda: write_cells(self.tensor, placed))
        self._host.reshape(-1)[cells[0]] = cells[1]
        self.num_cells_sent += len(rows)
