"""Batches that break a rule are refused before anything is read or written through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import batch_of, lanes_for
from memory_models import checkpoint_of, config_of
from sampling_batches import greedy_batch, token_masks

from naru_proto.errors import InternalError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions, TokenMasks

VOCAB = 97


@pytest.fixture(scope="module")
def runner() -> Iterator[CpuRunner]:
    options = RunnerOptions(block_size=16, num_blocks=8, max_num_tokens=32, max_num_seqs=2, max_model_len=64)
    runner = cpu.load_runner(checkpoint_of(config_of(max_position_embeddings=64)), options)
    yield runner
    runner.close()


@pytest.fixture
def batch() -> BatchInputs:
    """Two sequences: 5 and 3 tokens."""
    lanes = lanes_for([[1, 2, 3, 4, 5], [6, 7, 8]], 16, 8)
    return batch_of([(lanes[0], 5), (lanes[1], 3)], 16)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def test_the_batch_itself_is_fine(runner: CpuRunner, batch: BatchInputs) -> None:
    assert runner.run(batch, greedy_batch(2, VOCAB)).token_ids.shape == (2,)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", ints(1, 2, 3, 4, 5, 6, 7, VOCAB), "token id"),
        ("token_ids", ints(1, 2, 3, 4, 5, 6, 7, -1), "token id"),
        ("positions", ints(0, 1, 2, 3, 5, 0, 1, 2), "positions"),
        ("positions", ints(0, 1, 2, 3, 2**31 - 1, 0, 1, 2), "positions"),
        ("slots", ints(16, 17, 18, 19, 20, 8 * 16, 33, 34), "slot"),
        ("slots", ints(-1, 17, 18, 19, 20, 32, 33, 34), "slot"),
        ("query_start", ints(0, 5, 9), "query_start"),
        ("query_start", ints(0, 9, 8), "query_start"),
        ("query_start", ints(0, 0, 8), "query_start"),
        ("query_start", ints(1, 5, 8), "query_start"),
        ("seq_lens", ints(4, 3), "seq_len"),
        ("seq_lens", ints(65, 3), "seq_len"),
        ("seq_lens", ints(5, 64), "block_table has too few columns"),
        ("block_table", np.full((2, 1), 8, np.int32), "block number"),
        ("block_table", np.full((2, 1), -1, np.int32), "block number"),
        ("block_table", np.full((2, 1), 7, np.int32), "not where"),
        ("logits_rows", ints(4, 8), "logits_rows"),
        ("logits_rows", ints(7, 4), "logits_rows"),
        ("logits_rows", ints(-1, 4), "logits_rows"),
        ("copies", np.array([[0, 8]], np.int32), "copy"),
        ("copies", np.array([[-1, 2]], np.int32), "copy"),
        ("num_generated_tokens", 4, "num_generated_tokens"),
        ("num_generated_tokens", -1, "num_generated_tokens"),
        ("num_generated_tokens", 9, "num_generated_tokens"),
        ("token_ids", np.arange(8, dtype=np.int64), "token_ids is int64"),
        ("positions", ints(0, 1), "positions is int32 of shape"),
        ("block_table", ints(1, 2), "block_table has shape"),
        ("copies", ints(1, 2), "copies"),
    ],
)
def test_a_broken_batch_is_refused_with_a_reason(
    runner: CpuRunner, batch: BatchInputs, field: str, value: Any, message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        runner.run(replace(batch, **{field: value}), greedy_batch(2, VOCAB))


def test_more_tokens_or_sequences_than_the_runner_was_built_for_are_refused(runner: CpuRunner) -> None:
    [lane] = lanes_for([[1] * 40], 16, 0)
    with pytest.raises(InternalError, match="number of tokens"):
        runner.logits(batch_of([(lane, 40)], 16))
    lanes = lanes_for([[1], [2], [3]], 16, 0)
    with pytest.raises(InternalError, match="number of sequences"):
        runner.logits(batch_of([(lane, 1) for lane in lanes], 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_limit": 0}, "vocab_limit"),
        ({"vocab_limit": VOCAB + 1}, "vocab_limit"),
        ({"target": ints(-2, 0)}, "target"),
        ({"target": ints(-1, VOCAB)}, "target"),
        ({"banned_start": ints(0, 2, 1), "banned_ids": ints(1, 2)}, "ragged"),
        ({"banned_start": ints(0, 1, 3), "banned_ids": ints(1, 2)}, "past its list"),
        ({"banned_start": ints(0, 1, 2), "banned_ids": ints(1, VOCAB)}, "bias, penalty or ban"),
        ({"penalty_start": ints(0, 0, 1), "penalty_ids": ints(-1), "penalty_output_counts": ints(1)}, "penalty"),
        ({"bias_start": ints(0, 0, 1), "bias_ids": ints(3), "bias_values": np.zeros(0, np.float32)}, "past its list"),
        ({"num_logprobs": ints(0, 3)}, "num_logprobs"),
        ({"temperature": np.array([0, np.nan], np.float32)}, "not finite"),
        ({"repetition_penalty": np.zeros(2, np.float32)}, "out of range"),
        ({"temperature": np.zeros(3, np.float32)}, "temperature"),
        ({"seed": np.zeros(2, np.int64)}, "seed is int64"),
        ({"masks": token_masks([[1]], VOCAB)}, "mask_rows"),
        ({"masks": TokenMasks(ints(0, 1), np.zeros((1, 99), np.uint32), ints(1), 1.0)}, "none of the masks"),
        ({"masks": TokenMasks(ints(-2, 0), np.zeros((1, 99), np.uint32), ints(1), 1.0)}, "none of the masks"),
        ({"masks": TokenMasks(ints(0, 0), np.zeros((1, 0), np.uint32), ints(1), 1.0)}, "shorter than vocab_limit"),
    ],
)
def test_broken_sampling_is_refused_with_a_reason(
    runner: CpuRunner, batch: BatchInputs, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InternalError, match=message):
        runner.run(batch, replace(greedy_batch(2, VOCAB), **changes))


def test_arrays_need_not_be_contiguous(runner: CpuRunner, batch: BatchInputs) -> None:
    wide = np.zeros((2, 6), np.int32)
    wide[:, :2:2] = batch.block_table
    strided = replace(batch, block_table=wide[:, ::3], token_ids=np.repeat(batch.token_ids, 2)[::2])
    expected = runner.run(batch, greedy_batch(2, VOCAB)).token_ids
    np.testing.assert_array_equal(runner.run(strided, greedy_batch(2, VOCAB)).token_ids, expected)


def test_a_refused_batch_leaves_the_cache_as_it_was(runner: CpuRunner, batch: BatchInputs) -> None:
    expected = runner.logits(batch)
    with pytest.raises(InternalError):
        runner.logits(replace(batch, logits_rows=ints(99), token_ids=np.zeros(8, np.int32)))
    np.testing.assert_array_equal(runner.logits(batch), expected)
