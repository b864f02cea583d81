"""A token's logits, bit for bit: whatever shares its step, however its prompt is cut, whoever shares the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from batches import Lane, all_logits, batch_of
from memory_models import checkpoint_of, config_of

from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import FloatArray, RunnerOptions, TensorFormat
from naru_worker.core.model_config import ModelConfig

pytestmark = pytest.mark.timeout(600)  # the first use of a variant compiles it

SIZE = 16
VOCAB = 97
MODELS: dict[str, tuple[ModelConfig, dict[str, TensorFormat], TensorFormat]] = {
    "full": (
        config_of(num_heads=6, num_kv_heads=2, head_dim=32, qk_norm=True),
        {"lm_head": "q8_0", "k": "f16"},
        "q4_1",
    ),
    "windows": (
        config_of(num_heads=6, num_kv_heads=2, head_dim=32, sliding_windows=(70, 200)),
        {"lm_head": "q8_0", "down": "q8_0"},
        "q4_0",
    ),
    "super-blocks": (
        config_of(hidden_size=256, intermediate_size=256, head_dim=64, num_layers=1),
        {"v": "q6_k", "down": "q6_k", "lm_head": "q6_k"},
        "q4_k",
    ),
}
KINDS = [
    ("full", "f16"),
    ("full", "f32"),
    ("windows", "f16"),
    ("windows", "f32"),
    ("super-blocks", "f16"),
    ("full", "int8"),
]


@pytest.fixture(params=KINDS, ids="-".join)
def runner(request: pytest.FixtureRequest, variant: str) -> Iterator[CpuRunner]:
    name, kv_format = request.param
    options = RunnerOptions(
        block_size=SIZE,
        num_blocks=640,
        max_num_tokens=1200,
        max_num_seqs=64,
        max_model_len=1200,
        num_threads=2,
        kv_format=kv_format,
    )
    runner = cpu.load_runner(checkpoint_of(*MODELS[name]), options, variant)
    yield runner
    runner.close()


class Sequences:
    """Hands out lanes of random tokens with blocks of their own."""

    def __init__(self) -> None:
        self._next_block = 1
        self._rng = np.random.default_rng(11)

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, VOCAB, length).tolist()
        return ids

    def lane(self, token_ids: Sequence[int]) -> Lane:
        count = len(token_ids) // SIZE + 1
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        return Lane(list(token_ids), blocks)

    def decoding(self, runner: CpuRunner, length: int) -> Lane:
        """A lane whose prompt is in the cache and whose first generated token is to be computed."""
        lane = self.lane(self.prompt(length))
        fill(runner, lane, length)
        lane.token_ids.append(int(self._rng.integers(0, VOCAB)))
        return lane


def fill(runner: CpuRunner, lane: Lane, chunk: int, mates: Sequence[Lane] = ()) -> FloatArray:
    """Computes the lane's prompt in chunks, each beside the next token of the mates; its last token's logits."""
    result = np.zeros(0, np.float32)
    while lane.num_computed < lane.num_prompt_tokens:
        n = min(chunk, lane.num_prompt_tokens - lane.num_computed)
        result = runner.logits(batch_of([*((mate, 1) for mate in mates), (lane, n)], SIZE))[-1].copy()
        lane.num_computed += n
    return result


def test_a_generated_token_does_not_depend_on_its_batch(runner: CpuRunner) -> None:
    sequences = Sequences()
    lengths = [127, 128, 560, 5]
    lanes = [sequences.decoding(runner, length) for length in lengths]
    # Alone, two members share the ranges of a context; among many, one walks them all.
    alone = [runner.logits(batch_of([(lane, 1)], SIZE))[0].copy() for lane in lanes]
    others = [sequences.decoding(runner, 3 + 7 * i % 150) for i in range(50)]
    prompt = sequences.lane(sequences.prompt(300))
    long_prompt = sequences.lane(sequences.prompt(900))
    for mates, prompts in ((1, []), (5, []), (16, []), (50, []), (0, [prompt]), (50, [prompt]), (9, [long_prompt])):
        rows = [
            *((other, 1) for other in others[: mates // 2]),
            *((lane, 1) for lane in lanes),
            *((other, 1) for other in others[mates // 2 : mates]),
            *((lane, lane.num_prompt_tokens) for lane in prompts),
        ]
        result = runner.logits(batch_of(rows, SIZE))[mates // 2 :]
        for length, expected, actual in zip(lengths, alone, result, strict=False):
            np.testing.assert_array_equal(actual, expected, f"context {length}, {mates} mates, {len(prompts)} prompts")


@pytest.mark.parametrize("length", [1, 20, 39, 150, 560])
def test_a_prompt_does_not_depend_on_how_it_is_cut(runner: CpuRunner, length: int) -> None:
    ids = Sequences().prompt(length)
    whole = all_logits(runner, ids)
    for chunk in (1, 7, 64, 300):
        if chunk < length:
            np.testing.assert_array_equal(all_logits(runner, ids, chunk), whole, f"chunks of {chunk}")


@pytest.mark.parametrize("length", [20, 560])
def test_a_prompt_does_not_depend_on_its_batch(runner: CpuRunner, length: int) -> None:
    sequences = Sequences()
    ids = sequences.prompt(length)
    expected = fill(runner, sequences.lane(ids), length)
    mates = [sequences.decoding(runner, 3 + 40 * i) for i in range(7)]
    for chunk, count in ((length, 1), (length, 7), (300, 3), (64, 7), (7, 1), (7, 7)):
        actual = fill(runner, sequences.lane(ids), chunk, mates[:count])
        np.testing.assert_array_equal(actual, expected, f"chunks of {chunk} beside {count}")
    # Behind another prompt, and over the edge of a piece of the tape.
    before, *prompts = (sequences.lane(part) for part in (sequences.prompt(45), ids, ids))
    rows = [(mates[0], 1), (before, 45), *((lane, length) for lane in prompts)]
    np.testing.assert_array_equal(runner.logits(batch_of(rows, SIZE))[2:], np.stack([expected] * 2))


def test_a_prompt_continues_the_blocks_of_another(runner: CpuRunner) -> None:
    sequences = Sequences()
    ids = sequences.prompt(600)
    expected = fill(runner, sequences.lane(ids), 600)
    first = sequences.lane([*ids[:560], *sequences.prompt(30)])
    fill(runner, first, 590)
    for cached in (16, 144, 560):
        lane = sequences.lane(ids)
        lane.blocks[: cached // SIZE] = first.blocks[: cached // SIZE]
        lane.num_computed = cached
        np.testing.assert_array_equal(fill(runner, lane, 600), expected, f"{cached} tokens cached")


@pytest.mark.parametrize(("num_prompt", "num_generated"), [(10, 30), (120, 20), (10, 530)])
def test_generated_tokens_computed_again_in_one_run_keep_their_numbers(
    runner: CpuRunner, num_prompt: int, num_generated: int
) -> None:
    """What a sequence does that lost its blocks."""
    sequences = Sequences()
    ids = sequences.prompt(num_prompt + num_generated)
    one_by_one, again = sequences.lane(ids), sequences.lane(ids)
    for lane in (one_by_one, again):
        lane.num_prompt_tokens = num_prompt
        fill(runner, lane, num_prompt)
    expected = []
    for _ in range(num_generated):
        expected.append(runner.logits(batch_of([(one_by_one, 1)], SIZE))[0].copy())
        one_by_one.num_computed += 1
    actual = runner.logits(batch_of([(again, num_generated)], SIZE, every_logit=True))
    np.testing.assert_array_equal(actual, np.stack(expected))


@pytest.mark.parametrize("num_heads", [10, 40])
def test_many_members_share_the_ranges_of_as_many_tokens_as_they_may(variant: str, num_heads: int) -> None:
    """One kv head and eight members: up to 31 tokens of a step are cut into all their ranges."""
    checkpoint = checkpoint_of(config_of(num_heads=num_heads, num_kv_heads=1, num_layers=1), default="q4_1")
    options = RunnerOptions(SIZE, 160, 32, 4, 1200, kv_format="f16")
    ids = Sequences().prompt(1200)
    results = []
    for num_threads, chunk in ((1, 1), (8, 31), (8, 32), (8, 1)):
        runner = cpu.load_runner(checkpoint, replace(options, num_threads=num_threads), variant)
        lane = Sequences().lane(ids)
        lane.num_prompt_tokens = 1138
        fill(runner, lane, 32)
        rows = []
        while lane.num_computed < len(ids):
            n = min(chunk, len(ids) - lane.num_computed)
            rows.append(runner.logits(batch_of([(lane, n)], SIZE, every_logit=True)).copy())
            lane.num_computed += n
        runner.close()
        results.append(np.concatenate(rows))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
