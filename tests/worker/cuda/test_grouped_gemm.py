"""Mixtures of experts under Triton's interpreter, against plain torch token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from memory_models import random_tensor  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.expert_schedule import max_tiles, schedule_experts  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.grouped_gemm import (  # noqa: E402
    combine_experts,
    grouped_gemm,
    tile_tokens,
)
from naru_worker.adapters.ops.cuda.weights import pack_matrix  # noqa: E402
from naru_worker.adapters.ops.protocol import TensorFormat  # noqa: E402

HIDDEN, INNER, NUM_EXPERTS = 96, 64, 5


def _choices(num_tokens: int, top_k: int) -> Any:
    """Different experts for each token; expert 3 gets none, the last token is padding."""
    rng = np.random.default_rng(num_tokens)
    rows = [rng.permutation([0, 1, 2, 4])[:top_k] for _ in range(num_tokens - 1)] + [np.full(top_k, -1)]
    return torch.from_numpy(np.array(rows)).to(torch.int32)


@pytest.mark.parametrize("num_tokens", [1, 150])
def test_schedule_holds_every_pair_once_in_order_of_experts_and_tokens(num_tokens: int) -> None:
    experts = _choices(num_tokens, 2)
    schedule = schedule_experts(experts, NUM_EXPERTS, tile_tokens=16)
    assert schedule.max_tiles == max_tiles(2 * num_tokens, NUM_EXPERTS, 16)
    flat, found = experts.flatten().tolist(), []
    for tile, expert in enumerate(schedule.tile_experts.tolist()):
        pairs = [p for p in schedule.pairs[16 * tile : 16 * tile + 16].tolist() if p >= 0]
        assert all(flat[p] == expert for p in pairs)
        assert bool(pairs) == (expert >= 0)
        found += pairs
    assert found == sorted((p for p, e in enumerate(flat) if e >= 0), key=lambda p: (flat[p], p))
    slots = schedule.slot_of_pair.tolist()
    assert [schedule.pairs[s] if s >= 0 else -1 for s in slots] == [p if e >= 0 else -1 for p, e in enumerate(flat)]


def _expected(x: Any, experts: Any, routing: Any, gate_up: Any, down: Any) -> Any:
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[token] += float(routing[token, choice]) * (down[expert].double() @ inner)
    return out


def _mixture(x: Any, experts: Any, routing: Any, gate_up: Any, down: Any, regime: Any, **kwargs: Any) -> Any:
    schedule = schedule_experts(experts, NUM_EXPERTS, tile_tokens=tile_tokens(regime, 80))
    h = grouped_gemm(x, gate_up, NUM_EXPERTS, schedule, regime=regime, is_sorted=False)
    gate, up = h.chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up
    y = grouped_gemm(h, down, NUM_EXPERTS, schedule, regime=regime, is_sorted=True)
    return combine_experts(y, schedule, routing, **kwargs)


@pytest.mark.parametrize(("num_tokens", "regime"), [(1, "generated"), (2, "prompt"), (24, "generated"), (40, "prompt")])
def test_plain_experts_give_the_weighted_sum_of_their_results(num_tokens: int, regime: Any) -> None:
    x, experts = torch.randn(num_tokens, HIDDEN), _choices(num_tokens, 2)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) / 10
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER) / 10
    routing = torch.rand(num_tokens, 2)
    routing[-1] = torch.nan
    expected = _expected(x, experts, routing, gate_up, down)
    torch.testing.assert_close(
        _mixture(x, experts, routing, gate_up, down, regime).double(), expected, rtol=1e-4, atol=1e-4
    )
    residual = torch.randn(num_tokens, HIDDEN)
    result = _mixture(x, experts, routing, gate_up, down, regime, residual=residual)
    torch.testing.assert_close(result.double(), expected + residual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("formats", [("q4_1", "q4_0"), ("q8_0", "q8_0"), ("e4m3_row", "e4m3_b32")])
def test_quantized_experts_are_one_matrix(formats: tuple[TensorFormat, TensorFormat]) -> None:
    rng = np.random.default_rng(0)
    packed, values = [], []
    for tensor_format, rows, columns in zip(formats, (2 * INNER, HIDDEN), (HIDDEN, INNER), strict=True):
        part, decoded = random_tensor("experts", tensor_format, (NUM_EXPERTS * rows, columns), rng)
        (segment,) = pack_matrix([part], [None], torch.float32).segments
        packed.append(segment)
        values.append(torch.from_numpy(decoded).reshape(NUM_EXPERTS, rows, columns))
    x, experts, routing = torch.randn(7, HIDDEN), _choices(7, 2), torch.rand(7, 2)
    expected = _expected(x, experts, routing, *values)
    for regime in ("generated", "prompt"):
        result = _mixture(x, experts, routing, packed[0], packed[1], regime)
        assert (result.double() - expected).abs().max() <= 2e-3 * expected.abs().max()


def test_a_token_is_the_same_bit_for_bit_whatever_its_mates() -> None:
    x, experts, routing = torch.randn(20, HIDDEN), _choices(20, 2), torch.rand(20, 2)
    gate_up, down = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN, INNER)
    whole = _mixture(x, experts, routing, gate_up, down, "generated")
    alone = _mixture(x[4:5], experts[4:5], routing[4:5], gate_up, down, "generated")
    assert torch.equal(alone, whole[4:5])
