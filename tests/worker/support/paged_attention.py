"""Paged caches with garbage in all that nobody wrote, and the attention over them in plain torch, float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PagedCase:
    """Sequences whose last `query_lens` tokens ask; keys and values are in the cache."""

    q: Tensor
    """(M, num_heads, head_dim), a part of wider rows."""
    key_cache: Tensor
    value_cache: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    keys: list[Tensor]
    """Of each sequence, (seq_len, num_kv_heads, head_dim) float32: what the cache holds of it."""
    values: list[Tensor]

    def expected(self, scale: float, window: int | None) -> Tensor:
        """(M, num_heads, head_dim) float32; zeros in rows of sequences without tokens."""
        expected = torch.zeros(self.q.shape)
        for s, length in enumerate(self.seq_lens.tolist()):
            start, stop = self.query_start[s : s + 2].tolist()
            if length == 0:
                continue
            positions = torch.arange(length - (stop - start), length)
            expected[start:stop] = attend(
                self.q[start:stop].float(), self.keys[s], self.values[s], positions, scale, window
            )
        return expected


def assert_attended(actual: Tensor, case: PagedCase, scale: float, window: int | None) -> None:
    """A kernel's result is what the case expects, to its type's precision."""
    tolerance = 1e-5 if actual.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(actual.float(), case.expected(scale, window), atol=tolerance, rtol=tolerance)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """Rows at `positions` over the keys at 0, 1, ..; rows before the first key see nothing and are zeros."""
    rows = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    scores = torch.einsum("tngd,lnd->tngl", rows, k) * scale
    distance = positions[:, None] - torch.arange(len(k))[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden[:, None, None, :], -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("tngl,lnd->tngd", weights, v).reshape(q.shape)


def paged_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    seed: int = 0,
) -> PagedCase:
    """Random numbers; blocks out of order, slots that nobody wrote, the null block and blocks before the window NaN."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or dtype
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(seq_lens), max([*counts, 1]), dtype=torch.int32)
    # A block of keys lies beside its values, as in an arena, and there are further numbers between the blocks.
    layout = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim + 16), math.nan)
    scale_layout = torch.full((num_blocks, 2, num_kv_heads, block_size), math.nan)
    keys, values = [], []
    for s, (length, count, query_len) in enumerate(zip(seq_lens, counts, query_lens, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        table[s, :count] = torch.tensor(blocks, dtype=torch.int32)
        first_needed = 0 if window is None else min(length, max(0, length - query_len - window + 1))
        stored = []
        for part in range(2):
            new, scales = _rounded(torch.randn(length, num_kv_heads, head_dim, generator=generator), kv_dtype)
            for position in range(first_needed, length):
                block, at = blocks[position // block_size], position % block_size
                layout[block, part, at, :, :head_dim] = new[position]
                scale_layout[block, part, :, at] = scales[position]
            stored.append(new * scales[..., None])
        keys.append(stored[0])
        values.append(stored[1])
        table[s, : first_needed // block_size] = 0
    if kv_dtype == torch.int8:
        layout = layout.nan_to_num(99.0)
    cache = layout.to(kv_dtype)[..., :head_dim]
    scaled = scale_layout.transpose(2, 3) if kv_dtype == torch.int8 else None
    rows = torch.randn(sum(query_lens), num_kv_heads * (group + 2), head_dim, generator=generator).to(dtype)
    return PagedCase(
        q=rows[:, : num_kv_heads * group],
        key_cache=cache[:, 0],
        value_cache=cache[:, 1],
        key_scales=None if scaled is None else scaled[:, 0],
        value_scales=None if scaled is None else scaled[:, 1],
        block_table=table,
        query_start=torch.tensor([0, *torch.tensor(list(query_lens)).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32),
        keys=keys,
        values=values,
    )


def _rounded(new: Tensor, kv_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers as the cache can hold them, and their scales, (tokens, heads)."""
    if kv_dtype != torch.int8:
        return new.to(kv_dtype).float(), torch.ones(new.shape[:-1])
    scales = new.abs().amax(-1) / 127.0
    return (new / scales[..., None]).round(), scales
