"""Rotation and KV writes under Triton's interpreter, against `ref`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Tensor, dtype

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.rope_kv import rope_kv  # noqa: E402
from naru_worker.adapters.ops.protocol import BatchInputs, KVConfig  # noqa: E402
from naru_worker.adapters.ops.ref import RefOps  # noqa: E402
from naru_worker.core.model_config import RopeConfig  # noqa: E402
from naru_worker.core.rope import inverse_frequencies  # noqa: E402

BLOCK_SIZE = 16
NUM_BLOCKS = 4
POSITIONS = [0, 1, 17, 40]
SLOTS = [16, 31, 63, 32]


def rotations(rope: RopeConfig, max_positions: int) -> Tensor:
    angles = torch.arange(max_positions).double()[:, None] * torch.tensor(inverse_frequencies(rope)).double()
    table: Tensor = torch.cat([angles.cos(), angles.sin()], 1).float()
    return table


def reference(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rope: RopeConfig | None, cache: dtype
) -> tuple[Tensor, RefOps]:
    ops = RefOps(KVConfig(1, num_kv_heads, head_dim, BLOCK_SIZE, NUM_BLOCKS), cache)
    empty = np.zeros(0, np.int32)
    slots, positions = np.array(SLOTS, np.int32), np.array(POSITIONS, np.int32)
    ops.begin(
        BatchInputs(empty, positions, slots, empty, empty, empty.reshape(0, 0), empty, np.zeros((0, 2), np.int32))
    )
    return ops.rope_kv(qkv.float(), 0, num_heads, rope), ops


def strided_cache(num_kv_heads: int, head_dim: int, dtype: dtype) -> tuple[Tensor, Tensor]:
    """Keys and values whose blocks lie far apart, as in an arena that holds all layers of a block together."""
    both = torch.zeros((NUM_BLOCKS, 3, 2, BLOCK_SIZE, num_kv_heads, head_dim), dtype=dtype)
    return both[:, 1, 0], both[:, 1, 1]


@pytest.mark.parametrize("cache", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(9, 3, 32, 32), (4, 2, 80, 80), (2, 2, 96, 24), (35, 5, 64, 0), (3, 1, 256, 256)],
)
def test_queries_turn_and_keys_and_values_go_to_their_slots(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, cache: dtype
) -> None:
    torch.manual_seed(head_dim)
    rope = RopeConfig(theta=10000.0, rotary_dim=rotary_dim) if rotary_dim else None
    width = (num_heads + 2 * num_kv_heads) * head_dim
    # Two rows more than there are tokens stand for the padding of a graph; rows are wider than what is read of them.
    qkv = torch.randn(len(SLOTS) + 2, width + 7)[:, :width]
    qkv[0, -head_dim:] = 0.0
    keys, values = strided_cache(num_kv_heads, head_dim, cache)
    scales = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads) if cache == torch.int8 else [None, None]
    q_out = torch.full((len(qkv), num_heads, head_dim), torch.nan)
    rope_kv(
        qkv,
        None if rope is None else rotations(rope, 64),
        torch.tensor([*POSITIONS, 0, 0], dtype=torch.int32),
        torch.tensor([*SLOTS, -1, -1], dtype=torch.int32),
        q_out,
        keys,
        values,
        num_heads=num_heads,
        key_scales=scales[0],
        value_scales=scales[1],
    )
    exact = torch.float32 if cache == torch.float8_e4m3fn else cache
    expected, ops = reference(qkv[: len(SLOTS)].contiguous(), num_heads, num_kv_heads, head_dim, rope, exact)
    torch.testing.assert_close(q_out[: len(SLOTS)].reshape(expected.shape), expected, atol=1e-5, rtol=1e-5)
    assert q_out.isfinite().all()
    for part, mine in ((0, keys), (1, values)):
        theirs = ops.cache[part, 0]
        if cache == torch.int8:
            assert ops.scales is not None
            torch.testing.assert_close(scales[part], ops.scales[part, 0])
            assert (mine.int() - theirs.int()).abs().max() <= 1  # where 1e-7 decides about a rounding
            assert (mine != theirs).float().mean() < 0.001
        elif cache == torch.float8_e4m3fn:
            torch.testing.assert_close(mine.float(), theirs.to(cache).float(), atol=1e-3, rtol=0.13)
            assert (mine.float() != theirs.to(cache).float()).float().mean() < 0.001
        else:
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


def test_heads_are_normalised_before_they_turn() -> None:
    torch.manual_seed(1)
    rope = RopeConfig(theta=500.0, rotary_dim=16)
    qkv = torch.randn(4, 8 * 32)
    q_norm, k_norm = torch.rand(32) + 0.5, torch.rand(32) + 0.5
    keys, values = strided_cache(2, 32, torch.float32)
    q_out = torch.empty(4, 4, 32)
    positions, slots = torch.tensor(POSITIONS, dtype=torch.int32), torch.tensor(SLOTS, dtype=torch.int32)
    table = rotations(rope, 41)
    rope_kv(qkv, table, positions, slots, q_out, keys, values, num_heads=4, q_norm=q_norm, k_norm=k_norm, eps=0.1)
    heads = qkv.view(4, 8, 32).clone()
    spread = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 0.1)
    heads[:, :4] *= spread[:, :4] * q_norm
    heads[:, 4:6] *= spread[:, 4:6] * k_norm
    expected, ops = reference(heads.view(4, -1), 4, 2, 32, rope, torch.float32)
    torch.testing.assert_close(q_out.view(4, -1), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(keys, ops.cache[0, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, ops.cache[1, 0])


def test_fp8_saturates_without_scales_and_fits_with_them() -> None:
    qkv = torch.linspace(-900.0, 900.0, 4 * 3 * 32).view(4, 96)
    positions, slots = torch.tensor(POSITIONS, dtype=torch.int32), torch.tensor(SLOTS, dtype=torch.int32)
    given = qkv.view(4, 3, 32)[:, 2]
    for scales in (None, torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1)):
        keys, values = strided_cache(1, 32, torch.float8_e4m3fn)
        q_out = torch.empty(4, 1, 32)
        rope_kv(qkv, None, positions, slots, q_out, keys, values, num_heads=1, key_scales=scales, value_scales=scales)
        at = torch.tensor(SLOTS)
        stored = values.float()[at // BLOCK_SIZE, at % BLOCK_SIZE, 0]
        if scales is None:
            torch.testing.assert_close(stored, given.clamp(-448, 448).to(torch.float8_e4m3fn).float())
        else:
            stored = stored * scales[at // BLOCK_SIZE, at % BLOCK_SIZE]
            torch.testing.assert_close(stored, given, rtol=0.07, atol=0.01)
