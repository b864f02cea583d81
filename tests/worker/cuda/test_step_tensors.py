"""Batches split by kind, and their way to the device in one copy."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from batches import Lane, batch_of  # noqa: E402

from naru_worker.adapters.ops.cuda.staging import Staging  # noqa: E402
from naru_worker.adapters.ops.cuda.step_tensors import (  # noqa: E402
    num_generated_sequences,
    step_arrays,
    step_tensors,
)
from naru_worker.adapters.ops.protocol import Int32Array  # noqa: E402


def lines(*numbers: int) -> Int32Array:
    return np.array(numbers, np.int32)


def test_generated_rows_of_a_sequence_are_a_run_and_prompts_keep_theirs() -> None:
    drafted = Lane([1, 2, 3, 4, 5], [7, 8], num_computed=3, num_prompt_tokens=3)
    single = Lane([1, 2], [9], num_computed=1, num_prompt_tokens=1)
    prompt = Lane(list(range(20)), [3, 4, 5, 6, 2], num_computed=4)
    batch = batch_of([(drafted, 2), (single, 1), (prompt, 16)], 4)
    assert num_generated_sequences(batch) == 2
    step = step_arrays(batch, lines(5, 2), 8, 4)
    arrays = {name: array.tolist() for name, array in step.arrays.items()}
    assert (step.num_generated, step.longest_generated, step.longest_prompt_chunk) == (3, 5, 16)
    assert step.most_run_rows == 2, "two rows of eight heads fill the smallest tile"
    assert arrays["generated_lens"] == [4, 5, 2]
    assert (arrays["run_start"], arrays["run_lines"]) == ([0, 2, 3], [5, 2])
    assert (arrays["prompt_start"], arrays["prompt_lens"], arrays["prompt_table"]) == ([0, 16], [20], [[3, 4, 5, 6, 2]])


def test_a_run_that_is_too_long_for_a_tile_is_cut() -> None:
    lanes = [Lane([1] * (2 + n), [7, 8, 9, 3, 5, 6], num_computed=1, num_prompt_tokens=1) for n in (17, 0, 8)]
    batch = batch_of([(lane, len(lane.token_ids) - 1) for lane in lanes], 4)
    step = step_arrays(batch, lines(4, 1, 0), 8, 4)
    assert step.arrays["run_start"].tolist() == [0, 8, 16, 18, 19, 27, 28]
    assert step.arrays["run_lines"].tolist() == [4, 4, 4, 1, 0, 0]
    assert step.most_run_rows == 8


@pytest.mark.parametrize("num_computed", [0, 3])
def test_steps_of_one_kind_have_nothing_of_the_other(num_computed: int) -> None:
    lane = Lane([1, 2, 3, 4], [7], num_computed=num_computed, num_prompt_tokens=3 if num_computed else 4)
    batch = batch_of([(lane, 4 - num_computed)], 4)
    step = step_arrays(batch, lines(*range(num_generated_sequences(batch))), 1, 4)
    assert (step.num_generated, step.longest_prompt_chunk) == ((1, 0) if num_computed else (0, 4))
    assert len(step.arrays["generated_lens"]) == len(step.arrays["run_lines"]) == step.num_generated
    assert step.arrays["prompt_start"].tolist() == ([0] if num_computed else [0, 4])


def test_arrays_arrive_whole_whatever_their_sizes() -> None:
    staging = Staging(torch.device("cpu"))
    rng = np.random.default_rng(0)
    for length in (0, 1, 3, 17, 100_000):
        arrays = {
            "bytes": rng.integers(0, 255, length, np.uint8),
            "ids": rng.integers(-9, 9, (length, 2), np.int32),
            "words": rng.integers(0, 9, length, np.int64),
            "turned": rng.standard_normal((3, length)).astype(np.float32).T,
        }
        for name, tensor in staging.put(arrays).items():
            assert np.array_equal(tensor.numpy(), arrays[name])
            assert tensor.data_ptr() % 16 == 0


def test_a_step_on_the_device_has_the_arrays_of_the_host() -> None:
    lane = Lane([1, 2, 3, 4], [7])
    step = step_arrays(batch_of([(lane, 4)], 4), lines(), 1, 4)
    table = torch.zeros(3, 2, dtype=torch.int32)
    tensors = step_tensors(step, Staging(torch.device("cpu")).put(step.arrays), table)
    assert tensors.token_ids.tolist() == [1, 2, 3, 4]
    assert tensors.slots.tolist() == [28, 29, 30, 31]
    assert tensors.longest_prompt_chunk == 4
    assert tensors.generated_table is table
