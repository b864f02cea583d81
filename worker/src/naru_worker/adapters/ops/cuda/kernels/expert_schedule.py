"""Which tokens go to which expert, sorted on the device: counts, offsets and a schedule of tiles, without a host sync.

The schedule has a fixed upper bound of tiles, so that a CUDA graph may hold the product over it. Slots of one expert
follow one another in the order of their tokens: a stable sort, so everything after it is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_BLOCK = 256
"""Pairs that are looked at together."""
_EXPERTS = 128
"""Experts whose counts are looked at together, at least: a power of two, and one code for nearly all models."""
_NUM_WARPS = 4
_ALIGNED = 4
"""32-bit numbers of 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExpertSchedule:
    """Pairs (token, choice) in the order of their experts; pair = token * top_k + choice."""

    top_k: int
    tile_tokens: int
    pairs: Tensor
    """(max_slots,), int32: the pair in each slot; -1 in slots that fill up an expert's last tile."""
    slot_of_pair: Tensor
    """(M * top_k,), int32: where each pair went; -1 where a pair has no expert."""
    tile_experts: Tensor
    """(max_tiles,), int32: the expert of each tile of `tile_tokens` slots; -1: nothing to do."""

    @property
    def max_tiles(self) -> int:
        """The bound that grids have."""
        return len(self.tile_experts)


def max_tiles(num_pairs: int, num_experts: int, tile_tokens: int) -> int:
    """Tiles that any choice of experts needs at most: each expert's last one may be nearly empty."""
    return min(num_pairs, -(-num_pairs // tile_tokens) + num_experts - 1)


@triton.jit(do_not_specialize=("num_pairs",))
def _count_kernel(experts, counts, num_pairs, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += (tl.load(experts + at, mask=at < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=("num_pairs", "num_experts"))
def _scatter_kernel(
    experts, counts, pairs, slot_of_pair, tile_experts, num_pairs, num_experts,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each expert: its offset from all counts, then its pairs in order."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    tiles = (tl.load(counts + others, mask=others < num_experts, other=0) + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(others < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(others == expert, tiles, 0), axis=0)
    for tile in range(first_tile, first_tile + own_tiles):
        tl.store(tile_experts + tile, expert)
    slot = first_tile * TILE
    for first in range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_own = tl.load(experts + at, mask=at < num_pairs, other=-1) == expert
        before = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pairs + slot + before - 1, at, mask=is_own)
        tl.store(slot_of_pair + at, slot + before - 1, mask=is_own)
        slot += tl.sum(is_own.to(tl.int32), axis=0)


def schedule_experts(experts: Tensor, num_experts: int, *, tile_tokens: int) -> ExpertSchedule:
    """Sorts the chosen experts.

    Args:
        experts: (M, top_k), int32, contiguous: the experts of each token; -1 (padding) goes nowhere.
        num_experts: How many there are.
        tile_tokens: Slots of a tile, as the product will have them.

    Source: the sorting of tokens by expert with padded blocks as in vLLM's fused MoE, without its atomic additions.
    """
    num_pairs, device = experts.numel(), experts.device
    tiles = max_tiles(num_pairs, num_experts, tile_tokens)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    # One table, so that it is cleared by one launch; what kernels are given starts at a multiple of 16 bytes.
    slots, padded = tiles * tile_tokens, -(-tiles // _ALIGNED) * _ALIGNED
    assert tile_tokens % _ALIGNED == 0
    table = torch.full((slots + padded + num_pairs,), -1, dtype=torch.int32, device=device)
    pairs, tile_experts, slot_of_pair = table[:slots], table[slots : slots + tiles], table[slots + padded :]
    if num_pairs:
        _count_kernel[(num_experts,)](experts, counts, num_pairs, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
        _scatter_kernel[(num_experts,)](
            experts, counts, pairs, slot_of_pair, tile_experts, num_pairs, num_experts,
            TILE=tile_tokens, EXPERTS=max(_EXPERTS, triton.next_power_of_2(num_experts)), BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
    return ExpertSchedule(experts.shape[1], tile_tokens, pairs, slot_of_pair, tile_experts)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """For tiles of generated and of prompt tokens, and as many experts as models have, or adapters."""
    yield CompileCase(
        name="expert_schedule_count",
        kernel=_count_kernel,
        arch=arch,
        signature={"experts": "*i32", "counts": "*i32", "num_pairs": "i32", "BLOCK": "constexpr"},
        constexprs={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=("experts", "counts"),
    )
    pointers = ("experts", "counts", "pairs", "slot_of_pair", "tile_experts")
    for tile in (16, 64):
        for num_experts in (_EXPERTS, 2 * _EXPERTS):
            yield CompileCase(
                name=f"expert_schedule_scatter/m{tile}/e{num_experts}",
                kernel=_scatter_kernel,
                arch=arch,
                signature={
                    **dict.fromkeys(pointers, "*i32"),
                    **dict.fromkeys(("num_pairs", "num_experts"), "i32"),
                    **dict.fromkeys(("TILE", "EXPERTS", "BLOCK"), "constexpr"),
                },
                constexprs={"TILE": tile, "EXPERTS": num_experts, "BLOCK": _BLOCK},
                num_warps=_NUM_WARPS,
                num_stages=3,
                aligned=pointers,
            )
