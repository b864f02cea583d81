"""Samples rows of logits on the device, without the host knowing what comes out.

Semantics are those of `adapters.ops.sampling_ref`: the same generator, the same line of tokens, so that a seed gives
the same token here as there, except where float32 cannot tell two places of the line apart (one draw in a million).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.sampling_best import best
from naru_worker.adapters.ops.cuda.kernels.sampling_draw import choose
from naru_worker.adapters.ops.cuda.kernels.sampling_edits import edit
from naru_worker.adapters.ops.cuda.kernels.sampling_levels import CANDIDATES, LEVELS, gather_candidates
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import CHUNK
from naru_worker.adapters.ops.cuda.kernels.sampling_scores import score
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingKinds, SamplingTensors


@dataclass(frozen=True, slots=True)
class SamplerSpace:
    """Scratch and results of steps of up to `num_rows` rows; results are valid until the next step."""

    work: Tensor | None  # (R, vocab) float32, edited rows, and those whose line is long
    best_values: Tensor  # (R, chunks)
    best_ids: Tensor
    raw_values: Tensor
    raw_sums: Tensor
    level_counts: Tensor  # (R, chunks, LEVELS)
    level_masses: Tensor
    kept_masses: Tensor  # (R, chunks)
    candidates: Tensor  # (R, CANDIDATES)
    candidate_ids: Tensor
    log_sums: Tensor  # (R,)
    heads: Tensor  # (R, chunks, K) int64
    token_ids: Tensor  # (R,) int32
    logprobs: Tensor  # (R,) float32
    ranks: Tensor  # (R,) int32
    top_ids: Tensor  # (R, K) int32
    top_logprobs: Tensor  # (R, K) float32

    @staticmethod
    def make(
        num_rows: int, vocab_limit: int, max_logprobs: int, device: torch.device | str, *, with_work: bool = True
    ) -> SamplerSpace:
        """Allocates it; without `work` (4 bytes a row and token) rows can be greedy and scored only."""

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=device)

        chunks = triton.cdiv(vocab_limit, CHUNK)
        return SamplerSpace(
            work=make(triton.cdiv(vocab_limit, 16) * 16) if with_work else None,
            best_values=make(chunks),
            best_ids=make(chunks, dtype=torch.int32),
            raw_values=make(chunks),
            raw_sums=make(chunks),
            level_counts=make(chunks, LEVELS, dtype=torch.int32),
            level_masses=make(chunks, LEVELS),
            kept_masses=make(chunks),
            candidates=make(CANDIDATES),
            candidate_ids=make(CANDIDATES, dtype=torch.int32),
            log_sums=make(),
            heads=make(chunks, max(1, max_logprobs), dtype=torch.int64),
            token_ids=make(dtype=torch.int32),
            logprobs=make(),
            ranks=make(dtype=torch.int32),
            top_ids=make(max_logprobs, dtype=torch.int32),
            top_logprobs=make(max_logprobs),
        )


def sample(
    logits: Tensor,
    tensors: SamplingTensors,
    kinds: SamplingKinds,
    space: SamplerSpace,
    *,
    pending: Tensor | None = None,
) -> None:
    """Fills the results of `space` for the rows of `logits`; those of `tensors` beyond them are not looked at.

    Args:
        logits: (R, vocab), float32 or 16-bit, last stride 1. Read only.
        tensors: What the rows ask for.
        kinds: Which kernels are needed; more than needed do no harm. Its `max_logprobs` is K of `space`.
        space: For R rows at least.
        pending: (R,) int32, each row's newest output token where the host did not know it yet when it counted tokens
            for penalties; -1: it did. The batch has to be packed with `has_pending`.
    """
    work = space.work if kinds.has_edits or kinds.has_draws else None
    limit = kinds.vocab_limit
    if kinds.has_edits:
        assert work is not None
        edit(logits, tensors, work, limit, has_masks=kinds.has_masks, pending=pending)
    raw = (space.raw_values, space.raw_sums) if kinds.has_scores else (None, None)
    edited = work if kinds.has_edits else None
    best(logits, tensors.flags, edited, limit, space.best_values, space.best_ids, *raw)
    levels = None
    if kinds.has_draws:
        assert work is not None
        levels = (space.level_counts, space.level_masses, space.kept_masses, space.candidates, space.candidate_ids)
        gather_candidates(logits, tensors, work, limit, space.best_values, *levels)
    choose(
        tensors,
        work,
        limit,
        space.best_values,
        space.best_ids,
        levels,
        space.token_ids[: len(logits)],
        has_masks=kinds.has_masks,
    )
    if kinds.has_scores:
        score(
            logits,
            tensors,
            limit,
            *(space.raw_values, space.raw_sums),
            space.token_ids,
            space.log_sums,
            space.heads,
            space.logprobs,
            space.ranks,
            space.top_ids[: len(logits)],
            space.top_logprobs[: len(logits)],
        )
