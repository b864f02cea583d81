"""Which experts each token goes to, and with which weight: the router's product, a softmax, the greatest of it.

Products are added in float32, in an order that the router's shape alone decides; so is all that follows. A token's
choice is the same whoever its mates are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime

_TOKENS: dict[Regime, int] = {"generated": 16, "prompt": 64}
_EXPERTS = 16
"""Of a program. Few, so that the router of a single token is read by many programs."""
_COLUMNS = 128
_COLUMNS_OF_SPLIT = 512
_NUM_WARPS, _NUM_STAGES = 4, 3
_CHOICES = (2, 4, 8)


@triton.jit(do_not_specialize=("num_tokens", "num_experts"))
def _scores_kernel(
    x, router, partial, num_tokens, num_experts, num_columns, x_stride,
    EXPERTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = tl.zeros((EXPERTS, TOKENS), tl.float32)
    for turn in range(SPLIT // COLUMNS):
        columns = tl.program_id(2) * SPLIT + turn * COLUMNS + tl.arange(0, COLUMNS)
        inside = (columns < num_columns)[None, :]
        at = experts.to(tl.int64)[:, None] * num_columns + columns[None, :]
        weight = tl.load(router + at, mask=inside & (experts < num_experts)[:, None], other=0.0)
        at = tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
        given = tl.load(x + at, mask=inside & (tokens < num_tokens)[:, None], other=0.0)
        total = tl.dot(weight, tl.trans(given), total, input_precision="ieee")
    line = tl.program_id(2).to(tl.int64) * num_tokens + tokens
    to = partial + line[None, :] * num_experts + experts[:, None]
    tl.store(to, total, mask=(experts < num_experts)[:, None] & (tokens < num_tokens)[None, :])


@triton.jit(do_not_specialize=("num_tokens", "num_experts", "num_splits", "renormalizes"))
def _choose_kernel(
    partial, experts, routing, num_tokens, num_experts, num_splits, renormalizes,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, EXPERTS)
    scores = tl.zeros((EXPERTS,), tl.float32)
    for split in range(num_splits):
        line = partial + (split * num_tokens + token) * num_experts
        scores += tl.load(line + each, mask=each < num_experts, other=0.0)
    scores = tl.where(each < num_experts, scores, float("-inf"))
    odds = tl.exp(scores - tl.max(scores, axis=0))
    odds = odds / tl.sum(odds, axis=0)
    # Below all odds, so that none is chosen twice.
    left = tl.where(each < num_experts, odds, -1.0)
    choices = tl.arange(0, CHOICES)
    chosen, weights = tl.zeros((CHOICES,), tl.int32), tl.zeros((CHOICES,), tl.float32)
    for choice in tl.static_range(CHOSEN):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        chosen = tl.where(choices == choice, best, chosen)
        weights = tl.where(choices == choice, tl.max(left, axis=0), weights)
        left = tl.where(each == best, -1.0, left)
    # Flags, not constants: one code for both.
    weights = tl.where(renormalizes != 0, weights / tl.sum(weights, axis=0), weights)
    at = token * CHOSEN + choices
    tl.store(experts + at, chosen, mask=choices < CHOSEN)
    tl.store(routing + at, weights, mask=choices < CHOSEN)


def route(
    x: Tensor, router: Tensor, num_chosen: int, *, renormalizes: bool, regime: Regime
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Chooses the experts of each token: the `num_chosen` greatest of a softmax over all, the first of two alike.

    Args:
        x: (M, num_columns), 16 bits (float32 under the interpreter); rows may be strided.
        router: (num_experts, num_columns), contiguous, the type of x.
        num_chosen: At most num_experts.
        renormalizes: Whether weights are made to sum up to 1.
        regime: The kind of the tokens.

    Returns:
        (M, num_chosen) int32, best first, and the weight of each, float32. What comes of numbers that are none may be
        experts that do not exist.
    """
    assert x.stride(1) == 1 and router.is_contiguous() and num_chosen <= len(router)
    (tokens, columns), num_experts, device = x.shape, len(router), x.device
    experts = torch.empty((tokens, num_chosen), dtype=torch.int32, device=device)
    routing = torch.empty((tokens, num_chosen), dtype=torch.float32, device=device)
    if tokens == 0:
        return experts, routing
    splits = triton.cdiv(columns, _COLUMNS_OF_SPLIT)
    partial = torch.empty((splits, tokens, num_experts), dtype=torch.float32, device=device)
    _scores_kernel[(triton.cdiv(num_experts, _EXPERTS), triton.cdiv(tokens, _TOKENS[regime]), splits)](
        x, router, partial, tokens, num_experts, columns, x.stride(0),
        **_scores_constants(regime), num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    _choose_kernel[(tokens,)](
        partial, experts, routing, tokens, num_experts, splits, int(renormalizes),
        **_choose_constants(num_experts, num_chosen), num_warps=1,
    )  # fmt: skip
    return experts, routing


def _scores_constants(regime: Regime) -> dict[str, int]:
    return {"EXPERTS": _EXPERTS, "TOKENS": _TOKENS[regime], "COLUMNS": _COLUMNS, "SPLIT": _COLUMNS_OF_SPLIT}


def _choose_constants(num_experts: int, num_chosen: int) -> dict[str, int]:
    wide = {"EXPERTS": triton.next_power_of_2(num_experts), "CHOSEN": num_chosen}
    return {**wide, "CHOICES": triton.next_power_of_2(num_chosen)}


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both kinds of tokens; as many experts as Mixtral and Qwen have."""
    for dtype in ("fp16", "bf16"):
        types = {"x": f"*{dtype}", "router": f"*{dtype}", "partial": "*fp32"}
        for regime in _TOKENS:
            constants = _scores_constants(regime)
            yield _case(f"route_scores/{dtype}/{regime}", _scores_kernel, arch, types, constants, _NUM_WARPS)
    types = {"partial": "*fp32", "experts": "*i32", "routing": "*fp32"}
    for num_experts in (8, 64, 128):
        for num_chosen in _CHOICES:
            constants, name = _choose_constants(num_experts, num_chosen), f"route_choose/e{num_experts}/k{num_chosen}"
            yield _case(name, _choose_kernel, arch, types, constants, 1)


def _case(
    name: str, kernel: Any, arch: int, types: dict[str, str], constants: dict[str, int], num_warps: int
) -> CompileCase:
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    return CompileCase(
        name=name,
        kernel=kernel,
        arch=arch,
        signature=signature,
        constexprs=constants,
        num_warps=num_warps,
        num_stages=_NUM_STAGES,
        aligned=(*types, *(n for n in ("num_columns", "x_stride") if n in signature)),
        expects=("HMMA",) if kernel is _scores_kernel else (),
    )
