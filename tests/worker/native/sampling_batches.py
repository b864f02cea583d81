"""Sampling batches for tests: everything off, and rows laid over it."""

from __future__ import annotations

from typing import Any

import numpy as np

from naru_worker.adapters.ops.protocol import SamplingBatch


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
    )


def greedy_batch(num_rows: int, vocab_limit: int) -> SamplingBatch:
    """Every row takes its best token."""
    return sampling_batch([{"temperature": 0.0}] * num_rows, vocab_limit)
