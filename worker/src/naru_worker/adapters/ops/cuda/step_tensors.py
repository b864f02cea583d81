"""A step's inputs as the kernels take them: generated rows apart from prompts, everything on the device.

`step_arrays` is plain numpy on the host; `StepTensors` are the same after one copy, over the table that is kept there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.attention_decode import packed_tokens, tile_tokens
from naru_worker.adapters.ops.protocol import BatchInputs, Int32Array


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What goes to the device, and what decides how kernels are launched."""

    arrays: Mapping[str, npt.NDArray[Any]]
    num_generated: int
    """Rows [0, num_generated) were generated, the others belong to prompts."""
    longest_generated: int
    """Most tokens that a generated row sees; 0 without any."""
    most_run_rows: int
    """No run has more rows; as many as the kernels' tile has places for."""
    longest_prompt_chunk: int
    """Most rows of one prompt; 0 without any."""


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of the step being computed. All int32."""

    token_ids: Tensor  # (M,)
    positions: Tensor  # (M,)
    slots: Tensor  # (M,) -1: nothing is written
    logits_rows: Tensor  # (R,)
    generated_lens: Tensor  # (G,) tokens that each generated row sees
    run_start: Tensor  # (runs + 1,) first row of each run: generated rows of a sequence that follow one another
    run_lines: Tensor  # (runs,) whose table each run reads
    prompt_start: Tensor  # (P + 1,) first row of each prompt, counted from num_generated
    prompt_lens: Tensor  # (P,)
    prompt_table: Tensor  # (P, max_blocks)
    generated_table: Tensor  # (lines, max_blocks)
    num_generated: int
    longest_generated: int
    most_run_rows: int
    longest_prompt_chunk: int


def num_generated_sequences(batch: BatchInputs) -> int:
    """Sequences whose rows were generated: the first ones."""
    return int(np.searchsorted(batch.query_start, batch.num_generated_tokens)) if batch.num_generated_tokens else 0


def step_arrays(batch: BatchInputs, lines: Int32Array, group: int, block_size: int) -> StepArrays:
    """Splits a batch by kind.

    Args:
        batch: Its arrays are views in the result.
        lines: Of the sequences with generated rows.
        group: Query heads of a kv head: it decides how many rows of a sequence are computed together.
        block_size: Tokens of a KV block.
    """
    num_generated, num_sequences = batch.num_generated_tokens, len(lines)
    starts = batch.query_start
    lens = batch.positions[:num_generated] + np.int32(1)
    run_start, run_lines = starts[: num_sequences + 1], lines
    longest_run = int((run_start[1:] - run_start[:-1]).max(initial=1))
    if longest_run > packed_tokens(group):
        longest_run = packed_tokens(group)
        run_start, run_lines = _cut(run_start, lines, longest_run)
    prompt_start, prompt_lens = starts[num_sequences:] - np.int32(num_generated), batch.seq_lens[num_sequences:]
    num_columns = -(-int(prompt_lens.max(initial=0)) // block_size)
    arrays = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slots,
        "logits_rows": batch.logits_rows,
        "generated_lens": lens,
        "run_start": run_start,
        "run_lines": run_lines,
        "prompt_start": prompt_start,
        "prompt_lens": prompt_lens,
        "prompt_table": batch.block_table[num_sequences:, :num_columns],
    }
    return StepArrays(
        arrays,
        num_generated,
        int(lens.max(initial=0)),
        tile_tokens(longest_run, group),
        int((prompt_start[1:] - prompt_start[:-1]).max(initial=0)),
    )


def _cut(run_start: Int32Array, lines: Int32Array, most_rows: int) -> tuple[Int32Array, Int32Array]:
    """Runs of at most so many rows."""
    counts = np.diff(run_start)
    pieces = -(-counts // most_rows)
    first_piece = np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(run_start[:-1], pieces) + (np.arange(len(first_piece)) - first_piece) * most_rows
    return np.append(starts, run_start[-1:]).astype(np.int32), np.repeat(lines, pieces)


def step_tensors(step: StepArrays, tensors: Mapping[str, Tensor], table: Tensor) -> StepTensors:
    """The step over the arrays' copies on the device, and the table of generated rows there."""
    placed = {name: tensors[name] for name in step.arrays}
    return StepTensors(
        **placed,
        generated_table=table,
        num_generated=step.num_generated,
        longest_generated=step.longest_generated,
        most_run_rows=step.most_run_rows,
        longest_prompt_chunk=step.longest_prompt_chunk,
    )
