"""Sampling batches for tests: everything off, and rows laid over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from naru_worker.adapters.ops.protocol import SamplingBatch, TokenMasks


def sampling_batch(rows: list[dict[str, Any]], vocab_limit: int, max_logprobs: int = 0) -> SamplingBatch:
    """One entry per row; absent fields take the value that does nothing."""

    def column(name: str, default: Any, dtype: Any) -> Any:
        return np.array([row.get(name, default) for row in rows], dtype)

    def starts(name: str) -> Any:
        return np.cumsum([0, *(len(row.get(name, ())) for row in rows)]).astype(np.int32)

    def flat(name: str, index: int, dtype: Any) -> Any:
        return np.array([entry[index] for row in rows for entry in row.get(name, ())], dtype)

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        presence_penalty=column("presence_penalty", 0.0, np.float32),
        frequency_penalty=column("frequency_penalty", 0.0, np.float32),
        repetition_penalty=column("repetition_penalty", 1.0, np.float32),
        seed=column("seed", 0, np.uint64),
        counter=column("counter", 0, np.uint64),
        target=column("target", -1, np.int32),
        num_logprobs=column("num_logprobs", -1, np.int32),
        bias_start=starts("bias"),
        bias_ids=flat("bias", 0, np.int32),
        bias_values=flat("bias", 1, np.float32),
        penalty_start=starts("penalties"),
        penalty_ids=flat("penalties", 0, np.int32),
        penalty_output_counts=flat("penalties", 1, np.int32),
        banned_start=starts("banned"),
        banned_ids=np.array([token for row in rows for token in row.get("banned", ())], np.int32),
        vocab_limit=vocab_limit,
        max_logprobs=max_logprobs,
        masks=token_masks([row.get("mask") for row in rows], vocab_limit),
    )


def token_masks(allowed: list[list[int] | None], vocab_limit: int, *, is_open: bool = True) -> TokenMasks | None:
    """Masks with the bits of these ids set; None: the row has no mask. Without any, none at all."""
    held = [ids for ids in allowed if ids is not None]
    if not held:
        return None
    words = np.zeros((len(held), (vocab_limit + 31) // 32), np.uint32)
    for place, ids in enumerate(held):
        for token_id in ids:
            words[place, token_id // 32] |= np.uint32(1 << token_id % 32)
    places = iter(range(len(held)))
    rows = np.array([-1 if ids is None else next(places) for ids in allowed], np.int32)
    return TokenMasks(rows, words, np.array([int(is_open)], np.int32), wait_s=0.02)


def greedy_batch(num_rows: int, vocab_limit: int) -> SamplingBatch:
    """Every row takes its best token."""
    return sampling_batch([{"temperature": 0.0}] * num_rows, vocab_limit)
