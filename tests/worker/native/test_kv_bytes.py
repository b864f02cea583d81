"""A KV cache of bytes: against the oracle with the same rounding, against itself in other batches, and in its size."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import Lane, all_logits, alone_and_together, batch_of, lanes_for
from memory_models import MemoryCheckpoint, checkpoint_of, config_of

from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import FloatArray, RawTensor, RunnerOptions
from naru_worker.core.model_config import ModelConfig

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

OPTIONS = RunnerOptions(16, 96, 400, 16, 600, num_threads=2, kv_format="int8")
SHAPES = {(20, 1): 2, (32, 1): 2, (64, 3): 3, (80, 7): 1, (96, 2): 1, (128, 4): 1, (256, 8): 1, (16, 19): 1}
"""(head size, query heads of a group): kv heads."""


@contextmanager
def running(checkpoint: MemoryCheckpoint, variant: str, **changes: Any) -> Iterator[CpuRunner]:
    """A runner whose cache is full of bytes that are NaN wherever a number is read from them."""
    runner = cpu.load_runner(checkpoint, replace(OPTIONS, **changes), variant)
    library, model = runner._library, runner._model
    ctypes.memset(library.naru_kv_base(model), 0xFF, library.naru_kv_bytes(model))
    try:
        yield runner
    finally:
        runner.close()


def prompt(length: int, config: ModelConfig, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()
    return ids


def oracle(checkpoint: MemoryCheckpoint, ids: list[int], **changes: Any) -> FloatArray:
    ref = pytest.importorskip("naru_worker.adapters.ops.ref", reason="the ref backend is written in torch")
    return all_logits(ref.load_runner(checkpoint, replace(OPTIONS, **changes)), ids)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_are_those_of_the_oracle_with_the_same_bytes(
    variant: str, shape: tuple[int, int], window: int | None
) -> None:
    head_dim, group = shape
    heads = SHAPES[shape]
    config = config_of(
        head_dim=head_dim, num_heads=group * heads, num_kv_heads=heads, num_layers=1, sliding_windows=(window,)
    )
    checkpoint = checkpoint_of(config)
    ids = prompt(145, config)
    expected = oracle(checkpoint, ids)
    scale = np.abs(expected).max()
    with running(checkpoint, variant, block_size=32 if group == 3 else 16) as runner:
        generated = all_logits(runner, ids, 16, are_generated=True)
        one_by_one = all_logits(runner, ids, 1, are_generated=True)
        of_prompt = all_logits(runner, ids)
    np.testing.assert_array_equal(one_by_one, generated)
    # A number that lies between two bytes may fall to either side.
    np.testing.assert_allclose(generated, expected, atol=3e-3 * scale, rtol=0)
    np.testing.assert_allclose(of_prompt, expected, atol=2e-2 * scale, rtol=0)


def test_bytes_move_logits_by_less_than_a_hundredth_of_their_spread(variant: str) -> None:
    config = config_of(num_heads=9, num_kv_heads=3, head_dim=64)
    ids = prompt(140, config)
    exact = oracle(checkpoint_of(config), ids, kv_format="f32")
    with running(checkpoint_of(config), variant) as runner:
        actual = all_logits(runner, ids, 1, are_generated=True)
    assert np.sqrt(np.mean((actual - exact) ** 2)) < 0.01 * exact.std()


def test_a_row_has_the_same_logits_alone_in_ranges_and_among_others(variant: str) -> None:
    """One row has its ranges shared by the members, 16 rows have them walked by one each."""
    config = config_of(num_heads=9, num_kv_heads=3, head_dim=32, sliding_windows=(None, 20))
    prompts = [prompt(length, config, seed) for seed, length in enumerate((1, 15, 16, 17, 31, 127, 128, 129, 300))]
    with running(checkpoint_of(config, default="q4_1"), variant, num_threads=3) as runner:
        lanes = lanes_for(prompts, 16, 8)
        alone, together = alone_and_together(runner, lanes, 16)
    np.testing.assert_array_equal(together, alone)


def test_a_copied_block_brings_its_scales_along(variant: str) -> None:
    config = config_of()
    with running(checkpoint_of(config), variant) as runner:
        lane = Lane(prompt(40, config), [5, 9, 2])
        runner.logits(batch_of([(lane, 40)], 16))
        lane.num_computed = 40
        lane.token_ids.append(7)
        expected = runner.logits(batch_of([(lane, 1)], 16))
        fork = Lane(lane.token_ids, [11, 12, 13], 40, num_prompt_tokens=40)
        copies = np.array([(5, 11), (9, 12), (2, 20), (20, 13)], np.int32)
        actual = runner.logits(replace(batch_of([(fork, 1)], 16), copies=copies))
    np.testing.assert_array_equal(actual, expected)


def test_keys_and_values_of_nothing_but_zeros_are_numbers(variant: str) -> None:
    config = config_of(num_layers=1)
    checkpoint = checkpoint_of(config)
    for name in ("layers.0.k", "layers.0.v"):
        tensor = checkpoint.tensors[name]
        checkpoint.tensors[name] = RawTensor(name, "f32", tensor.shape, memoryview(bytes(tensor.data.nbytes)))
    ids = prompt(20, config)
    expected = oracle(checkpoint, ids, kv_format="f32")
    with running(checkpoint, variant) as runner:
        for are_generated in (False, True):
            actual = all_logits(runner, ids, are_generated=are_generated)
            np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_a_cache_of_bytes_is_little_more_than_half_of_one_of_halves() -> None:
    config = config_of(head_dim=64)
    bytes_, halves = (cpu.kv_block_bytes(config, replace(OPTIONS, kv_format=f)) for f in ("int8", "f16"))
    assert bytes_ / halves == (64 + 4) / 128
    with running(checkpoint_of(config), cpu.isa()) as runner:
        assert runner.kv_bytes == OPTIONS.num_blocks * bytes_
        assert runner.kv_bytes == runner._library.naru_kv_bytes(runner._model)
