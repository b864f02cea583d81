"""Steps of a new runner that nobody asked for: its kernels are compiled, and on the device, before requests come.

A kernel takes Triton seconds to compile where its cache is empty, and all models of the process would wait for a step
that needs one. Loads run in threads of their own, beside other models' steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from naru_worker.adapters.ops.protocol import BatchInputs, Runner, RunnerOptions, SamplingBatch

STEPS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), (40,)),
    ((), (100,)),
    ((33,), ()),
    ((300,) * 3, (40, 9)),
    ((300,) * 17, ()),
    ((20,) * 33, ()),
)
"""Tokens that each generating sequence has, and tokens of each prompt: no step of any size needs a kernel that none of
these has needed (a test takes down what steps launch)."""

_MAX_LOGPROBS = 5


def warm_up(runner: Runner, options: RunnerOptions, vocab_size: int) -> None:
    """Runs a few steps of all kinds. They read and write the null block alone.

    Args:
        runner: New: no request has a block of it.
        options: What it was made for; steps beyond its limits are cut to them.
        vocab_size: Ids that may be drawn.

    Raises:
        Unavailable: the device has no room for them.
        DeviceFault: the device has failed.
    """
    for generating, prompts in STEPS:
        batch = null_batch(generating, prompts, options)
        for sampling in _samplings(len(batch.logits_rows), vocab_size):
            runner.run(batch, sampling)


def null_batch(generating: Sequence[int], prompts: Sequence[int], options: RunnerOptions) -> BatchInputs:
    """Sequences that have so many tokens, all of them in the null block, as far as the options allow them.

    Args:
        generating: Tokens of each, of which the last one is computed.
        prompts: Tokens of each, all of which are.
        options: Of the runner.
    """
    longest = min(options.max_model_len, options.max_num_tokens)
    lengths = [min(length, longest) for length in (*generating, *prompts)][: options.max_num_seqs]
    num_generated = min(len(generating), len(lengths))
    runs = [range(length - 1 if i < num_generated else 0, length) for i, length in enumerate(lengths)]
    while sum(map(len, runs)) > options.max_num_tokens:
        runs.pop()
    num_generated = min(num_generated, len(runs))
    starts = np.cumsum([0, *map(len, runs)]).astype(np.int32)
    positions = np.array([position for run in runs for position in run], np.int32)
    seq_lens = np.array([run.stop for run in runs], np.int32)
    return BatchInputs(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=positions % np.int32(options.block_size),
        query_start=starts,
        seq_lens=seq_lens,
        block_table=np.zeros((len(runs), -(-int(seq_lens.max()) // options.block_size)), np.int32),
        logits_rows=starts[1:] - np.int32(1),
        copies=np.zeros((0, 2), np.int32),
        num_generated_tokens=num_generated,
    )


def _samplings(num_rows: int, vocab_size: int) -> Iterator[SamplingBatch]:
    """All rows take their likeliest token; then all draw, edited and with log probabilities."""
    zeros, starts = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    ones, words = np.ones(num_rows, np.float32), np.zeros(num_rows, np.uint64)
    likeliest = SamplingBatch(
        temperature=0 * ones,
        top_k=zeros,
        top_p=ones,
        min_p=0 * ones,
        presence_penalty=0 * ones,
        frequency_penalty=0 * ones,
        repetition_penalty=ones,
        seed=words,
        counter=words,
        target=zeros - 1,
        num_logprobs=zeros - 1,
        bias_start=starts,
        bias_ids=zeros[:0],
        bias_values=ones[:0],
        penalty_start=starts,
        penalty_ids=zeros[:0],
        penalty_output_counts=zeros[:0],
        banned_start=starts,
        banned_ids=zeros[:0],
        vocab_limit=vocab_size,
        max_logprobs=0,
    )
    yield likeliest
    yield replace(
        likeliest,
        temperature=ones,
        top_k=zeros + 50,
        top_p=0.9 * ones,
        num_logprobs=zeros + _MAX_LOGPROBS,
        bias_start=np.arange(num_rows + 1, dtype=np.int32),
        bias_ids=zeros,
        bias_values=ones,
        max_logprobs=_MAX_LOGPROBS,
    )
