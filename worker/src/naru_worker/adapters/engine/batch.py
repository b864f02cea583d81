"""Turns a `StepPlan` into the arrays of one forward pass, in buffers made once.

Called by the engine at each step. Does not look at sampling. Block-table rows stay where they are while the batch does
not change, so that a decode step writes only what is new; `TableLines` tell a backend what that is.
"""

from __future__ import annotations

import numpy as np

from naru_worker.adapters.ops.protocol import BatchInputs, Int32Array, RunnerOptions, TableLines
from naru_worker.core.request import Sequence
from naru_worker.core.step import Row, StepPlan


class BatchBuilder:
    """Owns the input buffers of one model. Not thread-safe; a result is valid until the next `build`."""

    def __init__(self, options: RunnerOptions) -> None:
        num_tokens, num_seqs = options.max_num_tokens, options.max_num_seqs
        self._block_size = options.block_size
        width = -(-options.max_model_len // options.block_size) + 1
        self._token_ids = np.zeros(num_tokens, np.int32)
        self._positions = np.zeros(num_tokens, np.int32)
        self._slots = np.zeros(num_tokens, np.int32)
        self._query_start = np.zeros(num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(num_seqs, np.int32)
        self._tables = np.zeros((num_seqs, width), np.int32)
        self._iota = np.arange(max(options.max_model_len, num_tokens, num_seqs) + 1, dtype=np.int32)
        self._no_copies = np.zeros((0, 2), np.int32)
        self._owners: list[Sequence | None] = [None] * num_seqs
        self._owner_versions = [0] * num_seqs
        self._filled = [0] * num_seqs
        self._lines = np.zeros(num_seqs, np.int32)
        self._stamps = np.zeros(num_seqs, np.int64)
        self._last_stamp = 0
        self._stamped_by = object()
        self._free_lines = list(range(num_seqs))
        self._line_of: dict[Sequence, int] = {}
        self._row_of = [0] * num_seqs  # of each line, where its sequence stood last
        self._kept: BatchInputs | None = None
        self._kept_key = (0, 0, 0)

    def build(self, plan: StepPlan, logits_indices: list[int], drawn_by: tuple[int, ...] | None = None) -> BatchInputs:
        """Arrays for `plan`; `logits_indices` are the token indices whose logits are wanted, ascending. `drawn_by`: its
        tokens are not known yet, each is what this row of the step before draws.

        While sizes do not change, and every token's logits are wanted, it is the same object with new contents: a
        backend may keep what it derived from the addresses.
        """
        rows = plan.rows
        if plan.copies:
            self._owners = [None] * len(self._owners)  # copy-on-write changes entries in the middle of a table
        self._write_tables(rows)
        num_decodes = self._write_decodes(rows) if drawn_by is None else self._write_ahead(rows, drawn_by)
        num_tokens = num_decodes if num_decodes == len(rows) else self._write_runs(rows, num_decodes)
        num_generated = num_tokens if plan.is_decode else sum(row.num_tokens for row in rows if not row.is_prompt)
        if plan.copies or len(logits_indices) != num_tokens:
            logits_rows = np.array(logits_indices, np.int32)
            copies = np.array(plan.copies, np.int32) if plan.copies else self._no_copies
            return self._view(num_tokens, len(rows), num_generated, logits_rows, copies)
        key = (num_tokens, len(rows), num_generated)
        if self._kept is None or self._kept_key != key:
            # As many indices as tokens, ascending and distinct: all of them.
            self._kept = self._view(num_tokens, len(rows), num_generated, self._iota[:num_tokens], self._no_copies)
            self._kept_key = key
        return self._kept

    def _view(
        self, num_tokens: int, num_seqs: int, num_generated: int, logits_rows: Int32Array, copies: Int32Array
    ) -> BatchInputs:
        return BatchInputs(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:num_tokens],
            query_start=self._query_start[: num_seqs + 1],
            seq_lens=self._seq_lens[:num_seqs],
            block_table=self._tables[:num_seqs],
            logits_rows=logits_rows,
            copies=copies,
            num_generated_tokens=num_generated,
            table_lines=TableLines(self._stamped_by, self._lines[:num_seqs], self._stamps[:num_seqs]),
        )

    def forget(self) -> None:
        """Drops the references to sequences, for an idle engine; all block tables are rewritten next time."""
        self._owners = [None] * len(self._owners)
        self._line_of.clear()
        self._free_lines = list(range(len(self._owners)))

    def _write_decodes(self, rows: tuple[Row, ...]) -> int:
        """The leading single tokens; lists are cheaper than arrays at this size. Returns how many there are."""
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row in rows:
            if row.num_tokens != 1:
                break
            sequence, start = row.sequence, row.start
            tokens.append(sequence.token_ids[start])
            positions.append(start)
            slots.append(sequence.block_table[start // size] * size + start % size)
        return self._put_singles(tokens, positions, slots)

    def _write_ahead(self, rows: tuple[Row, ...], drawn_by: tuple[int, ...]) -> int:
        """Single tokens that are still to be drawn."""
        size = self._block_size
        slots = [row.sequence.block_table[row.start // size] * size + row.start % size for row in rows]
        return self._put_singles([-1 - place for place in drawn_by], [row.start for row in rows], slots)

    def _put_singles(self, tokens: list[int], positions: list[int], slots: list[int]) -> int:
        count = len(tokens)
        if count:
            self._token_ids[:count] = tokens
            self._positions[:count] = positions
            self._slots[:count] = slots
            np.add(self._positions[:count], 1, out=self._seq_lens[:count])
        self._query_start[: count + 1] = self._iota[: count + 1]
        return count

    def _write_runs(self, rows: tuple[Row, ...], num_decodes: int) -> int:
        """The rows after them. Returns the number of tokens of the step."""
        size = self._block_size
        offset = num_decodes
        for i in range(num_decodes, len(rows)):
            row = rows[i]
            start, count = row.start, row.num_tokens
            end = offset + count
            positions = self._iota[start : start + count]
            self._token_ids[offset:end] = row.token_ids
            self._positions[offset:end] = positions
            slots = self._slots[offset:end]
            np.take(self._tables[i], positions // size, out=slots)
            slots *= size
            slots += positions % size
            self._seq_lens[i] = start + count
            self._query_start[i + 1] = end
            offset = end
        return offset

    def _write_tables(self, rows: tuple[Row, ...]) -> None:
        """Brings row i of the table to the blocks of the i-th sequence.

        Tables only grow until they are given up (`table_version`), except by copy-on-write (all owners forgotten), so
        that equal owner and equal version mean: what stands there is a prefix of what must stand there. A sequence
        owns one row at most.
        """
        for i, row in enumerate(rows):
            sequence = row.sequence
            blocks = sequence.block_table
            count = len(blocks)
            is_known = self._owners[i] is sequence and self._owner_versions[i] == sequence.table_version
            if is_known and self._filled[i] == count:
                continue
            if not is_known:
                is_known = self._take_row(i, sequence, rows)
            filled = self._filled[i]
            if is_known and filled == count:
                continue
            if is_known and filled < count:
                self._tables[i, filled:count] = blocks[filled:]
            else:
                self._tables[i, :count] = blocks
                if count < filled:
                    self._tables[i, count:filled] = 0
            self._filled[i] = count
            self._last_stamp += 1
            self._stamps[i] = self._last_stamp

    def _take_row(self, i: int, sequence: Sequence, rows: tuple[Row, ...]) -> bool:
        """Makes row i a sequence's own; whether it has become a prefix of its table, moved from where that stood."""
        line = self._line_of.get(sequence)
        if line is None:
            line = self._new_line(rows)
            self._line_of[sequence] = line
            self._row_of[line] = i
        before, self._row_of[line] = self._row_of[line], i
        is_there = self._owners[before] is sequence
        version, self._owner_versions[i] = self._owner_versions[before], sequence.table_version
        if is_there:
            self._owners[before] = None
        self._owners[i] = sequence
        self._lines[i] = line
        if not is_there or before == i or version != sequence.table_version:
            return False
        # Most rows move up when a sequence before them has ended: numbers are copied, not lists turned into them.
        count = self._filled[before]
        width = max(count, self._filled[i])  # zeros stand behind what is filled
        self._tables[i, :width] = self._tables[before, :width]
        self._filled[i], self._stamps[i] = count, self._stamps[before]
        return True

    def _new_line(self, rows: tuple[Row, ...]) -> int:
        """A line that no sequence of the step has."""
        if not self._free_lines:
            present = {row.sequence for row in rows}
            for sequence in [each for each in self._line_of if each not in present]:
                line = self._line_of.pop(sequence)
                if self._owners[self._row_of[line]] is sequence:
                    self._owners[self._row_of[line]] = None
                self._free_lines.append(line)
        return self._free_lines.pop()
