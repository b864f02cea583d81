"""Low-rank adapters under Triton's interpreter, against plain torch row by row."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.lora import (  # noqa: E402
    lora_expand,
    lora_shrink,
    padded_rank,
    schedule_adapters,
)

COLUMNS = 600
ROWS = (136, 24)
"""Of two layers that read the same x."""


def _adapters(rank: int, count: int = 4) -> tuple[Any, list[Any], Any]:
    """A of both layers, B of each, scales; padded with zeros."""
    size = padded_rank(rank)
    a = torch.zeros(count, 2, size, COLUMNS)
    a[:, :, :rank] = torch.randn(count, 2, rank, COLUMNS)
    bs = [torch.zeros(count, rows, size) for rows in ROWS]
    for b in bs:
        b[:, :, :rank] = torch.randn(count, b.shape[1], rank)
    return a.flatten(1, 2), bs, torch.rand(count)


def _apply(x: Any, y: Any, adapters: Any, weights: tuple[Any, list[Any], Any], regime: Any) -> Any:
    a, bs, scales = weights
    out, first = y.clone(), 0
    schedule = schedule_adapters(adapters, len(a), regime=regime)
    parts = lora_shrink(x, a, schedule, rank=bs[0].shape[2], regime=regime)
    for index, b in enumerate(bs):
        lora_expand(parts, b, scales, schedule, out[:, first : first + b.shape[1]], regime=regime, index=index)
        first += b.shape[1]
    return out


def _expected(x: Any, y: Any, adapters: Any, weights: tuple[Any, list[Any], Any]) -> Any:
    a, bs, scales = weights
    out = y.double()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            inner = (a[adapter].double() @ x[row].double()).chunk(2)
            added = [b[adapter].double() @ h for b, h in zip(bs, inner, strict=True)]
            out[row] += float(scales[adapter]) * torch.cat(added)
    return out


@pytest.mark.parametrize("regime", ["generated", "prompt"])
@pytest.mark.parametrize(("num_tokens", "rank"), [(1, 64), (20, 8)])
def test_each_row_gets_what_its_own_adapter_adds(num_tokens: int, rank: int, regime: Any) -> None:
    weights = _adapters(rank)
    x, y = torch.randn(num_tokens, COLUMNS), torch.randn(num_tokens, sum(ROWS))
    adapters = (torch.arange(num_tokens, dtype=torch.int32) * 3 + 2) % 5 - 1
    adapters[adapters == 1] = 0
    expected = _expected(x, y, adapters, weights)
    result = _apply(x, y, adapters, weights, regime).double()
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(result[adapters < 0], y[adapters < 0].double())


def test_without_any_adapter_nothing_changes() -> None:
    x, y = torch.randn(3, COLUMNS), torch.randn(3, sum(ROWS))
    assert torch.equal(_apply(x, y, torch.full((3,), -1, dtype=torch.int32), _adapters(8), "generated"), y)
    none = torch.empty(0, dtype=torch.int32)
    assert _apply(x[:0], y[:0], none, _adapters(8), "generated").shape == (0, sum(ROWS))


def test_a_row_is_the_same_bit_for_bit_whatever_its_mates() -> None:
    weights = _adapters(16)
    x, y = torch.randn(18, COLUMNS), torch.randn(18, sum(ROWS))
    adapters = torch.arange(18, dtype=torch.int32) % 3
    whole = _apply(x, y, adapters, weights, "generated")
    assert torch.equal(_apply(x[7:8], y[7:8], adapters[7:8], weights, "generated"), whole[7:8])


def test_ranks_are_padded_or_refused() -> None:
    assert [padded_rank(rank) for rank in (1, 16, 17, 64)] == [16, 16, 32, 64]
    with pytest.raises(ValueError, match="rank 65"):
        padded_rank(65)
