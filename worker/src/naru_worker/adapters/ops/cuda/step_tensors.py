"""A step's inputs as the kernels take them: generated rows apart from prompts, everything on the device.

`step_arrays` is plain numpy on the host; `StepTensors` are the same after one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from naru_worker.adapters.ops.protocol import BatchInputs


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What goes to the device, and what decides how kernels are launched."""

    arrays: Mapping[str, npt.NDArray[Any]]
    num_generated: int
    """Rows [0, num_generated) were generated, the others belong to prompts."""
    longest_generated: int
    """Most tokens that a generated row sees; 0 without any."""
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
    generated_table: Tensor  # (G, max_blocks)
    prompt_start: Tensor  # (P + 1,) first row of each prompt, counted from num_generated
    prompt_lens: Tensor  # (P,)
    prompt_table: Tensor  # (P, max_blocks)
    num_generated: int
    longest_generated: int
    longest_prompt_chunk: int


def step_arrays(batch: BatchInputs) -> StepArrays:
    """Splits a batch by kind. A generated row is a sequence of its own, so that guessed tokens need no other kernel."""
    num_generated = batch.num_generated_tokens
    starts = batch.query_start
    num_sequences = int(np.searchsorted(starts, num_generated)) if num_generated else 0
    rows_of = np.repeat(np.arange(num_sequences), np.diff(starts[: num_sequences + 1]))
    lens = batch.positions[:num_generated] + np.int32(1)
    chunks = np.diff(starts[num_sequences:])
    arrays = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slots,
        "logits_rows": batch.logits_rows,
        "generated_lens": lens,
        "generated_table": batch.block_table[rows_of],
        "prompt_start": starts[num_sequences:] - np.int32(num_generated),
        "prompt_lens": batch.seq_lens[num_sequences:],
        "prompt_table": batch.block_table[num_sequences:],
    }
    return StepArrays(arrays, num_generated, int(lens.max(initial=0)), int(chunks.max(initial=0)))


def step_tensors(step: StepArrays, tensors: Mapping[str, Tensor]) -> StepTensors:
    """The step over the arrays' copies on the device."""
    placed = {name: tensors[name] for name in step.arrays}
    return StepTensors(
        **placed,
        num_generated=step.num_generated,
        longest_generated=step.longest_generated,
        longest_prompt_chunk=step.longest_prompt_chunk,
    )
