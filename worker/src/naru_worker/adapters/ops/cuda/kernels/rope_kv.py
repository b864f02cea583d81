"""Normalises and rotates queries and keys, and writes keys and values to their slots of the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.quantize import (
    FP8_ARCHITECTURES,
    fp8_scale,
    int8_scale,
    to_fp8,
    to_int8,
)

ELEMENTS_PER_PROGRAM = 1024
"""Elements of heads that one program turns: 16 bytes of 16-bit numbers a thread."""
_NUM_WARPS = 4
_SCALE_STRIDES = [f"{part}_scale_{axis}" for part in ("key", "value") for axis in ("block", "token", "head")]
_HEAD_SIZES = (32, 64, 80, 96, 128, 256)


@triton.jit
def _turned(row, head, inside, angles, norm, eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """Heads of one token as (heads, BLOCK) float32: normalised where there is a `norm`, rotated where ROTARY > 0."""
    at = tl.arange(0, BLOCK)
    mask = inside[:, None] & (at < HEAD_DIM)[None, :]
    first = row + head[:, None] * HEAD_DIM
    x = tl.load(first + at[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        spread = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        x = x * spread[:, None] * tl.load(norm + at, mask=at < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        # An element's partner is loaded once more rather than moved between threads: it lies in the same cache line.
        other = tl.where(at < half, at + half, at - half)
        turns = at < ROTARY
        y = tl.load(first + other[None, :], mask=mask & turns[None, :], other=0.0).to(tl.float32)
        if norm is not None:
            y = y * spread[:, None] * tl.load(norm + other, mask=turns, other=0.0).to(tl.float32)[None, :]
        place = tl.where(at < half, at, at - half)
        cos = tl.load(angles + place, mask=turns, other=1.0)
        sin = tl.load(angles + half + place, mask=turns, other=0.0)
        x = x * cos[None, :] + y * tl.where(at < half, -sin, sin)[None, :]
    return x


@triton.jit
def _write(first, head_stride, scales, scale_offset, scale_stride, x, head, inside, HEAD_DIM: tl.constexpr):
    """Heads of one token to the cache, in its format."""
    at = tl.arange(0, x.shape[1])
    mask = inside[:, None] & (at < HEAD_DIM)[None, :]
    to = first + head[:, None] * head_stride + at[None, :]
    if first.dtype.element_ty == tl.int8:
        scale, factor = int8_scale(tl.max(tl.abs(x), axis=1))
        tl.store(scales + scale_offset + head * scale_stride, scale, mask=inside)
        tl.store(to, to_int8(x * factor[:, None]), mask=mask)
    elif first.dtype.element_ty == tl.float8e4nv:
        if scales is not None:
            scale, factor = fp8_scale(tl.max(tl.abs(x), axis=1))
            tl.store(scales + scale_offset + head * scale_stride, scale, mask=inside)
            x = x * factor[:, None]
        tl.store(to, to_fp8(x), mask=mask)
    else:
        tl.store(to, x.to(first.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", *_SCALE_STRIDES])
def _rope_kv_kernel(
    qkv,
    rotations,
    positions,
    slots,
    q_out,
    keys,
    values,
    key_scales,
    value_scales,
    q_norm,
    k_norm,
    eps,
    num_heads,
    num_kv_heads,
    block_size,
    qkv_stride,
    q_stride,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    key_scale_block,
    key_scale_token,
    key_scale_head,
    value_scale_block,
    value_scale_token,
    value_scale_head,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, tile = tl.program_id(0), tl.program_id(1)
    row = qkv + token.to(tl.int64) * qkv_stride
    angles = rotations
    if ROTARY > 0:
        angles += tl.load(positions + token).to(tl.int64) * ROTARY
    q_tiles, kv_tiles = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        inside = head < num_heads
        x = _turned(row, head, inside, angles, q_norm, eps, HEAD_DIM, ROTARY, BLOCK)
        at = tl.arange(0, BLOCK)
        to = q_out + token.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + at[None, :]
        tl.store(to, x.to(q_out.dtype.element_ty), mask=inside[:, None] & (at < HEAD_DIM)[None, :])
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = (slot // block_size).to(tl.int64), slot % block_size
            is_key = tile < q_tiles + kv_tiles
            head = (tile - q_tiles - tl.where(is_key, 0, kv_tiles)) * HEADS + tl.arange(0, HEADS)
            inside = head < num_kv_heads
            if is_key:
                k_row = row + num_heads * HEAD_DIM
                x = _turned(k_row, head, inside, angles, k_norm, eps, HEAD_DIM, ROTARY, BLOCK)
                to = keys + block * key_block + offset * key_token
                at_scale = block * key_scale_block + offset * key_scale_token
                _write(to, key_head, key_scales, at_scale, key_scale_head, x, head, inside, HEAD_DIM)
            else:
                v_row = row + (num_heads + num_kv_heads) * HEAD_DIM
                x = _turned(v_row, head, inside, angles, None, eps, HEAD_DIM, 0, BLOCK)
                to = values + block * value_block + offset * value_token
                at_scale = block * value_scale_block + offset * value_scale_token
                _write(to, value_head, value_scales, at_scale, value_scale_head, x, head, inside, HEAD_DIM)


def rope_kv(
    qkv: Tensor,
    rotations: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Splits qkv into q, k and v; rotated q goes to `q_out`, rotated k and v to their slots.

    Args:
        qkv: (M, (num_heads + 2 num_kv_heads) head_dim), any row stride.
        rotations: (max_positions, rotary_dim) float32, contiguous: cosines, then sines, of a position's angles; None:
            nothing turns. Element i turns with element i + rotary_dim / 2; what is beyond rotary_dim stays.
        positions: (M,) int32.
        slots: (M,) int32, block * block_size + offset; -1: nothing is written for that token.
        q_out: (M, num_heads, head_dim), the last two axes contiguous. Mutated.
        key_cache: (num_blocks, block_size, num_kv_heads, head_dim), last stride 1. Mutated.
        value_cache: The same of values. Mutated.
        num_heads: Of the queries.
        q_norm: (head_dim,) weights of an RMSNorm of each query head before it turns.
        k_norm: The same of key heads.
        eps: Of these norms.
        key_scales: (num_blocks, block_size, num_kv_heads) float32. Mutated. int8: largest magnitude of the head / 127;
            fp8: / 448, or None: numbers are rounded as they are, and saturate.
        value_scales: The same of values. Mutated.
    """
    num_tokens, head_dim = q_out.shape[0], q_out.shape[2]
    num_kv_heads = key_cache.shape[2]
    assert qkv.stride(1) == 1 and key_cache.stride(3) == 1 and value_cache.stride(3) == 1
    assert (key_cache.dtype == torch.int8) <= (key_scales is not None and value_scales is not None)
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    heads = max(1, ELEMENTS_PER_PROGRAM // block)
    tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rope_kv_kernel[(num_tokens, tiles)](
        qkv,
        rotations,
        positions,
        slots,
        q_out,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        q_norm,
        k_norm,
        eps,
        num_heads,
        num_kv_heads,
        key_cache.shape[1],
        qkv.stride(0),
        q_out.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        *((0, 0, 0) if value_scales is None else value_scales.stride()),
        HEAD_DIM=head_dim,
        ROTARY=0 if rotations is None else rotations.shape[1],
        BLOCK=block,
        HEADS=heads,
        num_warps=_NUM_WARPS,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Each pair of activations and cache with each head size; the variants of norm and rotation with one of them."""
    for dtype in ("fp16", "bf16"):
        for cache in (dtype, "i8", *(("fp8e4nv",) if arch in FP8_ARCHITECTURES else ())):
            for head_dim in _HEAD_SIZES:
                yield _case(arch, dtype, cache, head_dim, head_dim, with_norm=False)
            yield _case(arch, dtype, cache, 128, 128, with_norm=True)
        yield _case(arch, dtype, dtype, 64, 0, with_norm=False)
        yield _case(arch, dtype, dtype, 80, 32, with_norm=False)
        if arch in FP8_ARCHITECTURES:
            yield _case(arch, dtype, "fp8e4nv", 128, 128, with_norm=False, with_scales=True)
    yield _case(arch, "fp32", "fp32", 64, 64, with_norm=True)


def _case(
    arch: int, dtype: str, cache: str, head_dim: int, rotary: int, *, with_norm: bool, with_scales: bool | None = None
) -> CompileCase:
    has_scales = cache == "i8" if with_scales is None else with_scales
    block = triton.next_power_of_2(head_dim)
    scale, norm = "*fp32" if has_scales else "constexpr", "*fp32" if with_norm else "constexpr"
    signature = {"qkv": f"*{dtype}", "rotations": "*fp32" if rotary else "constexpr", "positions": "*i32"}
    signature |= {"slots": "*i32", "q_out": f"*{dtype}", "keys": f"*{cache}", "values": f"*{cache}"}
    signature |= {"key_scales": scale, "value_scales": scale, "q_norm": norm, "k_norm": norm, "eps": "fp32"}
    signature |= dict.fromkeys(("num_heads", "num_kv_heads", "block_size", "qkv_stride", "q_stride"), "i32")
    strides = [f"{part}_{axis}" for part in ("key", "value") for axis in ("block", "token", "head")]
    signature |= dict.fromkeys(strides + _SCALE_STRIDES, "i32")
    constants: dict[str, Any] = {name: None for name, kind in signature.items() if kind == "constexpr"}
    tile = {"HEAD_DIM": head_dim, "ROTARY": rotary, "BLOCK": block, "HEADS": max(1, ELEMENTS_PER_PROGRAM // block)}
    signature |= dict.fromkeys(tile, "constexpr")
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    name = f"rope_kv/{dtype}/kv-{cache}/d{head_dim}/r{rotary}" + "/norm" * with_norm
    return CompileCase(
        name=name + "/scales" * (has_scales and cache != "i8"),
        kernel=_rope_kv_kernel,
        arch=arch,
        signature=signature,
        constexprs=constants | tile,
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=(*aligned, "block_size", "qkv_stride", "q_stride", *strides),
    )
