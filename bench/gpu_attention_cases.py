"""The cases of what reads and writes the paged KV cache, in each of its formats. For `gpu`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench.gpu_cases import FP8_ARCH, KernelCase, Setup
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.attention_decode import (
    attention_decode,
    decode_partials_shape,
    split_count,
    split_tokens,
)
from naru_worker.adapters.ops.cuda.kernels.attention_prefill import attention_prefill
from naru_worker.adapters.ops.cuda.kernels.rope_kv import rope_kv

_LARGEST = {"int8": 127.0}
_MARGIN = 3.0
# Attention averages over many values, so that what is largest among the results is far below the largest value.


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of all sequences, in random blocks."""

    name: str
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    table: Tensor
    """(sequences, blocks), int32."""

    def of(self, sequence: int, length: int, *, is_key: bool) -> Tensor:
        """(length, kv heads, head size) float32 of one sequence."""
        rows = self.table[sequence].long()
        held, scales = (self.keys, self.key_scales) if is_key else (self.values, self.value_scales)
        found = held[rows].float()
        if scales is not None:
            found = found * scales[rows].unsqueeze(-1)
        return found.flatten(0, 1)[:length]

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        heads, dims = self.keys.shape[2:]
        return 2 * heads * (dims * self.keys.itemsize + (0 if self.key_scales is None else 4))


def cache_cases(setup: Setup) -> Iterator[KernelCase]:
    """Rotation with the cache's write, attention of generated tokens and of a prompt, for each format of the cache."""
    for name in ("16 bits", "int8", *(("fp8",) if setup.arch >= FP8_ARCH else ())):
        yield _rope(setup, name)
        yield _decode(setup, made_cache(setup, name, setup.batch, setup.context))
        yield _prefill(setup, made_cache(setup, name, 1, setup.prompt))


def made_cache(setup: Setup, name: str, sequences: int, tokens: int) -> Cache:
    """A cache of that format ("16 bits", "int8" or "fp8"), filled with random numbers."""
    blocks_each = -(-tokens // setup.block_size)
    count = 1 + sequences * blocks_each
    shape = (count, setup.block_size, setup.num_kv_heads, setup.head_dim)
    order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(1)).to(setup.device, torch.int32) + 1
    table = order.reshape(sequences, blocks_each)
    keys, values = setup.normal(*shape), setup.normal(*shape) * 0.5
    if name == "int8":
        (keys, key_scales), (values, value_scales) = (_bytes(tensor) for tensor in (keys, values))
        return Cache(name, keys, values, key_scales, value_scales, table)
    if name == "fp8":
        keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    return Cache(name, keys, values, None, None, table)


def _bytes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scales = tensor.float().abs().amax(-1) / _LARGEST["int8"]
    return (tensor.float() / scales.unsqueeze(-1)).round().to(torch.int8), scales


def _rope(setup: Setup, name: str) -> KernelCase:
    rows = setup.prompt
    cache = made_cache(setup, name, 1, rows)
    heads, kv_heads, dims = setup.num_heads, setup.num_kv_heads, setup.head_dim
    qkv = setup.normal(rows, (heads + 2 * kv_heads) * dims)
    angles = torch.outer(torch.arange(rows), 10_000.0 ** (-torch.arange(0, dims, 2) / dims)).to(setup.device)
    rotations = torch.cat([angles.cos(), angles.sin()], dim=1).float().contiguous()
    positions = torch.arange(rows, device=setup.device, dtype=torch.int32)
    blocks = cache.table[0].long()[positions.long() // setup.block_size]
    slots = (blocks * setup.block_size + positions % setup.block_size).to(torch.int32)
    q_out = torch.empty(rows, heads, dims, device=setup.device, dtype=setup.dtype)

    def launch() -> Tensor:
        rope_kv(
            qkv, rotations, positions, slots, q_out, cache.keys, cache.values, num_heads=heads,
            key_scales=cache.key_scales, value_scales=cache.value_scales,
        )  # fmt: skip
        return q_out

    def check() -> Tensor:
        q = launch().float()
        return torch.cat([q, *(cache.of(0, rows, is_key=is_key) for is_key in (True, False))], dim=1)

    def expected() -> Tensor:
        wide = qkv.float().reshape(rows, -1, dims)
        q, k, v = wide[:, :heads], wide[:, heads : heads + kv_heads], wide[:, heads + kv_heads :]
        cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        return torch.cat([turned(q), turned(k), v], dim=1)

    moved = 2 * qkv.numel() * qkv.itemsize - rows * 2 * kv_heads * dims * qkv.itemsize + rows * cache.token_bytes
    tolerance = max(setup.tolerance, {"int8": 1e-2, "fp8": 7e-2}.get(name, 0.0))
    return KernelCase(f"rope and KV write, {name}", launch, expected, tolerance, moved, check=check)


def _decode(setup: Setup, cache: Cache) -> KernelCase:
    batch, context, heads, dims = setup.batch, setup.context, setup.num_heads, setup.head_dim
    q = setup.normal(batch, heads, dims)
    out = torch.empty_like(q)
    lengths = torch.full((batch,), context, device=setup.device, dtype=torch.int32)
    starts = torch.arange(batch + 1, device=setup.device, dtype=torch.int32)
    splits = split_count(context, split_tokens(dims, cache.keys.itemsize))
    partials = torch.empty(
        decode_partials_shape(batch, heads, dims, splits), device=setup.device, dtype=torch.float32
    )  # fmt: skip

    def run() -> Tensor:
        attention_decode(
            q, cache.keys, cache.values, cache.table, starts[:-1], starts, lengths, out, partials,
            scale=1 / math.sqrt(dims), window=None, num_splits=splits, key_scales=cache.key_scales,
            value_scales=cache.value_scales, arch=setup.arch,
        )  # fmt: skip
        return out

    def expected() -> Tensor:
        return torch.cat([_attended(setup, cache, i, q[i : i + 1], context) for i in range(batch)])

    moved = batch * context * cache.token_bytes + 2 * q.numel() * q.itemsize
    operations = 4 * batch * context * heads * dims
    return _attention(setup, f"attention decode, {cache.name}", (run, expected), moved, operations)


def _prefill(setup: Setup, cache: Cache) -> KernelCase:
    rows, heads, dims = setup.prompt, setup.num_heads, setup.head_dim
    q = setup.normal(rows, heads, dims)
    out = torch.empty_like(q)
    start = torch.tensor([0, rows], device=setup.device, dtype=torch.int32)
    lengths = torch.tensor([rows], device=setup.device, dtype=torch.int32)

    def run() -> Tensor:
        attention_prefill(
            q, cache.keys, cache.values, cache.table, start, lengths, out, scale=1 / math.sqrt(dims), window=None,
            max_query_len=rows, key_scales=cache.key_scales, value_scales=cache.value_scales, arch=setup.arch,
        )  # fmt: skip
        return out

    moved = rows * cache.token_bytes + 2 * q.numel() * q.itemsize
    operations = 4 * heads * dims * (rows * (rows + 1) // 2)
    work = (run, lambda: _attended(setup, cache, 0, q, rows))
    return _attention(setup, f"attention prefill, {cache.name}", work, moved, operations)


def _attention(
    setup: Setup, name: str, work: tuple[Callable[[], Tensor], Callable[[], Tensor]], moved: int, operations: int
) -> KernelCase:
    return KernelCase(name, *work, _MARGIN * setup.tolerance, moved, operations)


def _attended(setup: Setup, cache: Cache, sequence: int, q: Tensor, length: int) -> Tensor:
    """(rows, heads, head size): the newest rows of a sequence, each over what is before it, head by head."""
    keys, values = (cache.of(sequence, length, is_key=is_key) for is_key in (True, False))
    group = setup.num_heads // setup.num_kv_heads
    at = torch.arange(length, device=setup.device)
    hidden = at.unsqueeze(0) > at[-len(q) :].unsqueeze(1)
    results = []
    for head in range(setup.num_heads):
        scores = q[:, head].float() @ keys[:, head // group].T / math.sqrt(setup.head_dim)
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=1)
        results.append(weights @ values[:, head // group])
    return torch.stack(results, dim=1)
