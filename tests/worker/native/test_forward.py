"""Whole steps of every variant: against numpy, and against themselves under other batches, chunks and caches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import Lane, all_logits, alone_and_together, batch_of, lanes_for
from memory_models import LEARNED, MemoryCheckpoint, checkpoint_of, config_of
from native_oracle import logits_of

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import RunnerOptions, TensorFormat
from naru_worker.core.model_config import ModelConfig, RopeConfig

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

OPTIONS = RunnerOptions(
    block_size=16,
    num_blocks=128,
    max_num_tokens=1200,
    max_num_seqs=16,
    max_model_len=1600,
    num_threads=2,
    kv_format="f32",
)

CONFIGS = {
    "plain": config_of(),
    "one kv head each": config_of(num_kv_heads=4),
    "group of 3": config_of(num_heads=9, num_kv_heads=3),
    "group of 7": config_of(num_heads=14, num_kv_heads=2),
    "group above a tile": config_of(num_heads=40, num_kv_heads=1),
    "head_dim 64": config_of(head_dim=64),
    "head_dim 80": config_of(head_dim=80),
    "head_dim 96": config_of(head_dim=96, num_kv_heads=1),
    "head_dim 128": config_of(head_dim=128),
    "head_dim 20": config_of(head_dim=20),
    "rotary part of the head": config_of(head_dim=32, rope=RopeConfig(theta=10000.0, rotary_dim=16)),
    "odd sizes": config_of(hidden_size=50, intermediate_size=33, vocab_size=61),
    "windows": config_of(num_layers=3, sliding_windows=(8, None, 24)),
    "heads normed": config_of(head_dim=32, qk_norm=True),
    "heads of an odd size normed": config_of(head_dim=20, num_kv_heads=1, qk_norm=True),
    "heads normed, learned positions": config_of(**LEARNED | {"norm": "rms"}, qk_norm=True),
    "tied": config_of(tie_word_embeddings=True, qkv_bias=True),
    "learned positions": config_of(**LEARNED),
    "exact gelu": config_of(**LEARNED | {"activation": "gelu"}),
}
LENGTHS = (1, 15, 16, 17, 33, 70, 130)


@contextmanager
def running(checkpoint: MemoryCheckpoint, variant: str, **changes: Any) -> Iterator[CpuRunner]:
    runner = cpu.load_runner(checkpoint, replace(OPTIONS, **changes), variant)
    try:
        yield runner
    finally:
        runner.close()


def prompt(length: int, config: ModelConfig, seed: int = 1) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()
    return ids


def poison(runner: CpuRunner) -> None:
    """Fills the whole cache with NaN, whatever the element type."""
    library, model = runner._library, runner._model
    ctypes.memset(library.naru_kv_base(model), 0xFF, library.naru_kv_bytes(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_numpys_at_every_length(variant: str, name: str) -> None:
    config = CONFIGS[name]
    checkpoint = checkpoint_of(config)
    ids = prompt(max(LENGTHS), config)
    expected = logits_of(checkpoint, ids)
    tolerance = 2e-5 * np.abs(expected).max()
    for block_size in (16, 32):
        with running(checkpoint, variant, block_size=block_size) as runner:
            poison(runner)
            for length in LENGTHS:
                actual = all_logits(runner, ids[:length])
                np.testing.assert_allclose(actual, expected[:length], atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "name", ["plain", "head_dim 20", "head_dim 80", "head_dim 128", "group of 7", "group above a tile", "windows"]
)
def test_half_precision_keys_and_values_move_logits_a_little(variant: str, name: str) -> None:
    config = CONFIGS[name]
    checkpoint = checkpoint_of(config)
    ids = prompt(130, config)
    expected = logits_of(checkpoint, ids)
    with running(checkpoint, variant, kv_format="f16") as runner:
        poison(runner)
        actual = all_logits(runner, ids)
    tolerance = 2e-2 if variant in ("amx", "avx512_bf16") else 4e-3
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64])
@pytest.mark.parametrize("name", ["plain", "windows", "learned positions"])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(variant: str, name: str, chunk: int) -> None:
    config = CONFIGS[name]
    ids = prompt(200, config)
    for kv_format in ("f32", "f16"):
        with running(checkpoint_of(config), variant, kv_format=kv_format) as runner:
            poison(runner)
            whole = all_logits(runner, ids)
            poison(runner)
            pieces = all_logits(runner, ids, chunk)
        np.testing.assert_array_equal(pieces, whole)


def test_sequences_of_many_lengths_share_a_step_without_touching_each_other(variant: str) -> None:
    config = config_of(num_heads=9, num_kv_heads=3, head_dim=32, sliding_windows=(None, 20))
    prompts = [prompt(length, config, seed) for seed, length in enumerate((1, 3, 16, 17, 31, 64, 190))]
    with running(checkpoint_of(config, default="q4_1"), variant, kv_format="f16") as runner:
        poison(runner)
        lanes = lanes_for(prompts, 16, 8)
        alone, together = alone_and_together(runner, lanes, 16)
    np.testing.assert_array_equal(together, alone)


def test_decodes_and_a_prompt_mix_in_one_step(variant: str) -> None:
    config = config_of(head_dim=32)
    with running(checkpoint_of(config), variant) as runner:
        first, second = lanes_for([prompt(40, config), prompt(75, config, 2)], 16, 8)
        runner.logits(batch_of([(first, 40)], 16))
        first.num_computed = 40
        first.token_ids.append(3)
        alone = [runner.logits(batch_of([(lane, n)], 16)) for lane, n in ((first, 1), (second, 75))]
        mixed = runner.logits(batch_of([(first, 1), (second, 75)], 16))
    np.testing.assert_array_equal(mixed, np.concatenate(alone))


@pytest.mark.parametrize("window", [None, 300])
def test_a_long_context_cut_into_ranges_gives_the_logits_of_the_prompt(variant: str, window: int | None) -> None:
    config = config_of(num_layers=1, sliding_windows=(window,))
    ids = prompt(900, config)
    with running(checkpoint_of(config), variant, num_threads=3) as runner:
        poison(runner)
        whole = all_logits(runner, ids)
        [lane] = lanes_for([ids], 16, 0)
        lane.num_prompt_tokens = 895
        runner.logits(batch_of([(lane, 895)], 16))
        for position in range(895, 900):
            lane.num_computed = position
            one = runner.logits(batch_of([(lane, 1)], 16))
            np.testing.assert_allclose(one[0], whole[position], atol=1e-5 * np.abs(whole).max(), rtol=0)


def test_a_step_longer_than_a_piece_of_the_tape_equals_short_ones(variant: str) -> None:
    """1100 tokens of three sequences in one call, with the logits of every token."""
    config = config_of(num_layers=2)
    prompts = [prompt(700, config, 1), prompt(30, config, 2), prompt(370, config, 3)]
    with running(checkpoint_of(config), variant) as runner:
        lanes = lanes_for(prompts, 16, 0)
        poison(runner)
        together = runner.logits(batch_of([(lane, len(lane.token_ids)) for lane in lanes], 16, every_logit=True))
        poison(runner)
        for lane, ids, first in zip(lanes, prompts, (0, 700, 730), strict=True):
            last = runner.logits(batch_of([(lane, len(ids))], 16))
            np.testing.assert_array_equal(together[first + len(ids) - 1], last[0])
            some = all_logits(runner, ids[:50])
            np.testing.assert_array_equal(together[first : first + min(50, len(ids))], some)


MIXES: dict[str, tuple[ModelConfig, dict[str, TensorFormat], TensorFormat]] = {
    "q4_1 with a q8_0 head": (config_of(tie_word_embeddings=True), {"embed": "q8_0"}, "q4_1"),
    "q4_0": (config_of(head_dim=32), {}, "q4_0"),
    "q8_0": (config_of(head_dim=32), {}, "q8_0"),
    "q4_k with q6_k values and head": (
        config_of(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64),
        {"v": "q6_k", "down": "q6_k", "lm_head": "q6_k"},
        "q4_k",
    ),
    "bf16": (config_of(), {}, "bf16"),
    "f16 with quantized keys": (config_of(), {"k": "q8_0"}, "f16"),
}


@pytest.mark.parametrize("name", MIXES)
def test_stored_formats_stay_within_the_rounding_of_activations(variant: str, name: str) -> None:
    config, formats, default = MIXES[name]
    checkpoint = checkpoint_of(config, formats, default)
    ids = prompt(60, config)
    expected = logits_of(checkpoint, ids)
    with running(checkpoint, variant, kv_format="f16") as runner:
        for count, are_generated in ((1, False), (20, False), (60, False), (1, True), (60, True)):
            actual = all_logits(runner, ids[:count], are_generated=are_generated)
            error = np.sqrt(np.mean((actual - expected[:count]) ** 2)) / expected.std()
            assert error < 0.05, f"{count} tokens, generated {are_generated}: off by {error:.3f} standard deviations"


@pytest.mark.parametrize("name", MIXES)
def test_generated_tokens_have_the_logits_of_the_plain_variant(variant: str, name: str) -> None:
    config, formats, default = MIXES[name]
    checkpoint = checkpoint_of(config, formats, default)
    ids = prompt(20, config)
    with running(checkpoint, "plain") as oracle, running(checkpoint, variant) as runner:
        expected = all_logits(oracle, ids, are_generated=True)
        actual = all_logits(runner, ids, are_generated=True)
    # A sum rounded the other way may move an activation by one step of 8 bits.
    assert np.abs(actual - expected).max() < 0.03 * expected.std()
    assert np.median(np.abs(actual - expected)) < 2e-3 * expected.std()


def test_blocks_are_copied_before_the_step_and_in_order(variant: str) -> None:
    config = config_of()
    with running(checkpoint_of(config), variant, kv_format="f16") as runner:
        poison(runner)
        lane = Lane(prompt(40, config), [5, 9, 2])
        runner.logits(batch_of([(lane, 40)], 16))
        lane.num_computed = 40
        lane.token_ids.append(7)
        expected = runner.logits(batch_of([(lane, 1)], 16))
        fork = Lane(lane.token_ids, [11, 12, 13], 40, num_prompt_tokens=40)
        batch = batch_of([(fork, 1)], 16)
        # 2 goes to 20, and 20 on to 13: the second copy reads what the first wrote.
        copies = np.array([(5, 11), (9, 12), (2, 20), (20, 13)], np.int32)
        actual = runner.logits(replace(batch, copies=copies))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("are_generated", [False, True])
@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_number_of_threads_changes_nothing(variant: str, threads: int, are_generated: bool) -> None:
    config = config_of(num_heads=9, num_kv_heads=3, head_dim=32)
    checkpoint = checkpoint_of(config, default="q4_1")
    ids = prompt(150, config)
    # One token at a time: members then share its ranges.
    chunk = 1 if are_generated else None
    with running(checkpoint, variant, num_threads=2) as runner:
        expected = all_logits(runner, ids, chunk, are_generated=are_generated)
    with running(checkpoint, variant, num_threads=threads) as runner:
        np.testing.assert_array_equal(all_logits(runner, ids, chunk, are_generated=are_generated), expected)


def test_a_step_without_logits_only_fills_the_cache(variant: str) -> None:
    config = config_of()
    with running(checkpoint_of(config), variant) as runner:
        [lane] = lanes_for([prompt(30, config)], 16, 0)
        whole = runner.logits(batch_of([(lane, 30)], 16))
        poison(runner)
        nothing = runner.logits(replace(batch_of([(lane, 20)], 16), logits_rows=np.zeros(0, np.int32)))
        lane.num_computed = 20
        rest = runner.logits(batch_of([(lane, 10)], 16))
    assert nothing.shape == (0, config.vocab_size)
    np.testing.assert_array_equal(rest, whole)


def test_sizes_announced_before_loading_are_those_of_the_loaded_model() -> None:
    config, formats, default = MIXES["q4_k with q6_k values and head"]
    checkpoint = checkpoint_of(config, formats, default)
    with running(checkpoint, cpu.isa()) as runner:
        assert runner.weight_bytes == cpu.weight_bytes(checkpoint)
        assert runner.kv_bytes == OPTIONS.num_blocks * cpu.kv_block_bytes(config, OPTIONS)
        assert runner.kv_bytes == runner._library.naru_kv_bytes(runner._model)
        files = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
        assert runner.weight_bytes < 1.25 * files, "weights stay quantized"


def test_a_tied_head_is_stored_once() -> None:
    tied = checkpoint_of(config_of(tie_word_embeddings=True))
    apart = checkpoint_of(config_of(tie_word_embeddings=False))
    assert cpu.weight_bytes(apart) - cpu.weight_bytes(tied) >= 97 * 64 * 4


def test_the_checkpoint_may_be_closed_after_loading(variant: str) -> None:
    config = config_of()
    checkpoint = checkpoint_of(config)
    expected = logits_of(checkpoint, [1, 2, 3])
    with running(checkpoint, variant) as runner:
        checkpoint.close()
        np.testing.assert_allclose(all_logits(runner, [1, 2, 3]), expected, atol=1e-4)


def test_a_closed_runner_refuses_to_run() -> None:
    with running(checkpoint_of(config_of()), "plain") as runner:
        runner.close()
        with pytest.raises(InternalError, match="closed"):
            all_logits(runner, [1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_blocks": 100_000_000}, "not enough memory|num_blocks is 100000000"),
    ],
)
def test_an_option_out_of_range_is_a_load_error_that_names_it(changes: dict[str, int], message: str) -> None:
    with pytest.raises(LoadError, match=message), running(checkpoint_of(config_of(num_layers=100)), "plain", **changes):
        pass
