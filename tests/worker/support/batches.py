"""Builds forward batches and runs prompts greedily through a runner, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from naru_worker.adapters.ops.protocol import BatchInputs, FloatArray, Int32Array, Runner


@dataclass
class Lane:
    """One sequence: its tokens, how many are in the cache, and its blocks."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    num_prompt_tokens: int = -1
    """Tokens from here on are generated ones; -1: all tokens given at first are prompt."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.token_ids)


def lanes_for(prompts: Sequence[Sequence[int]], block_size: int, max_tokens: int) -> list[Lane]:
    """One lane per prompt, with blocks for its whole life; block 0 stays free. Blocks are not in order, on purpose."""
    counts = [-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts]
    free = list(range(1, sum(counts) + 1))
    np.random.default_rng(7).shuffle(free)
    return [Lane(list(prompt), [free.pop() for _ in range(n)]) for prompt, n in zip(prompts, counts, strict=True)]


def num_blocks_for(prompts: Sequence[Sequence[int]], block_size: int, max_tokens: int) -> int:
    """Blocks a runner needs for `lanes_for`, the null block included."""
    return 1 + sum(-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts)


def batch_of(rows: Sequence[tuple[Lane, int]], block_size: int, *, every_logit: bool = False) -> BatchInputs:
    """The next `n` tokens of each (lane, n), rows of generated tokens first.

    Logits: of each row's last token, or of all tokens.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    num_generated = 0
    for lane, n in rows:
        if lane.num_computed >= lane.num_prompt_tokens:
            assert num_generated == len(ids), "rows of generated tokens come first"
            num_generated += n
        else:
            assert lane.num_computed + n <= lane.num_prompt_tokens, "a row has tokens of one kind"
        for position in range(lane.num_computed, lane.num_computed + n):
            ids.append(lane.token_ids[position])
            positions.append(position)
            slots.append(lane.blocks[position // block_size] * block_size + position % block_size)
        starts.append(len(ids))
    width = max(len(lane.blocks) for lane, _ in rows)
    table = [lane.blocks + [0] * (width - len(lane.blocks)) for lane, _ in rows]
    return BatchInputs(
        token_ids=_i32(ids),
        positions=_i32(positions),
        slots=_i32(slots),
        query_start=_i32(starts),
        seq_lens=_i32([lane.num_computed + n for lane, n in rows]),
        block_table=_i32(table).reshape(len(rows), width),
        logits_rows=_i32(range(len(ids)) if every_logit else [start - 1 for start in starts[1:]]),
        copies=np.zeros((0, 2), np.int32),
        num_generated_tokens=num_generated,
    )


def all_logits(
    runner: Runner, token_ids: Sequence[int], chunk: int | None = None, *, are_generated: bool = False
) -> FloatArray:
    """(T, vocab) logits of one prompt, or of as many generated tokens without one, computed in chunks."""
    [lane] = lanes_for([token_ids], runner.kv.block_size, 0)
    if are_generated:
        lane.num_prompt_tokens = 0
    pieces = []
    while lane.num_computed < len(token_ids):
        n = min(chunk or len(token_ids), len(token_ids) - lane.num_computed)
        pieces.append(runner.logits(batch_of([(lane, n)], runner.kv.block_size, every_logit=True)).copy())
        lane.num_computed += n
    return np.concatenate(pieces)


def alone_and_together(runner: Runner, lanes: Sequence[Lane], block_size: int) -> tuple[FloatArray, FloatArray]:
    """Logits of one generated token behind each prompt: each in a step of its own, then all in one step."""
    for lane in lanes:
        runner.logits(batch_of([(lane, len(lane.token_ids))], block_size))
        lane.num_computed = len(lane.token_ids)
        lane.token_ids.append(5)
    alone = np.concatenate([runner.logits(batch_of([(lane, 1)], block_size)) for lane in lanes])
    return alone, runner.logits(batch_of([(lane, 1) for lane in lanes], block_size))


def greedy(
    runner: Runner, prompts: Sequence[Sequence[int]], max_tokens: int, keep_logits: bool = False
) -> tuple[list[list[int]], list[list[FloatArray]]]:
    """Output ids of each prompt, all decoded together; with `keep_logits` the logits of each step too."""
    lanes = lanes_for(prompts, runner.kv.block_size, max_tokens)
    logits: list[list[FloatArray]] = [[] for _ in lanes]
    for step in range(max_tokens):
        # Prompts go in one by one: their sum may pass the runner's token limit.
        groups = [[(lane, len(lane.token_ids))] for lane in lanes] if step == 0 else [[(lane, 1) for lane in lanes]]
        result = np.concatenate([runner.logits(batch_of(rows, runner.kv.block_size)).copy() for rows in groups])
        for i, lane in enumerate(lanes):
            lane.num_computed = len(lane.token_ids)
            token = int(result[i].argmax())
            lane.token_ids.append(token)
            lane.output.append(token)
            if keep_logits:
                logits[i].append(result[i])
    return [lane.output for lane in lanes], logits


def _i32(values: Sequence[object] | range) -> Int32Array:
    return np.asarray(values, dtype=np.int32)
