"""Which experts tokens go to, under Triton's interpreter against plain torch."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.gated_add import gated_add  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.route import route  # noqa: E402


def _expected(x: Any, router: Any, num_chosen: int, *, renormalizes: bool) -> tuple[Any, Any]:
    odds = (x.double() @ router.double().T).softmax(-1)
    weights, experts = odds.topk(num_chosen, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if renormalizes else weights


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "regime"),
    [(1, 8, 2, 64, "generated"), (17, 60, 4, 200, "generated"), (5, 128, 8, 1100, "prompt"), (3, 3, 3, 32, "prompt")],
)
def test_the_best_of_the_softmax_are_chosen(
    num_tokens: int, num_experts: int, num_chosen: int, hidden: int, regime: Any
) -> None:
    x, router = torch.randn(num_tokens, hidden + 3)[:, :hidden], torch.randn(num_experts, hidden) / hidden**0.5
    for renormalizes in (True, False):
        experts, weights = route(x, router, num_chosen, renormalizes=renormalizes, regime=regime)
        chosen, odds = _expected(x, router, num_chosen, renormalizes=renormalizes)
        assert experts.dtype == torch.int32 and torch.equal(experts.long(), chosen)
        torch.testing.assert_close(weights.double(), odds, rtol=1e-5, atol=1e-6)


def test_of_two_alike_the_first_is_chosen_and_none_twice() -> None:
    router = torch.zeros(5, 32)
    router[3] = 1.0
    experts, weights = route(torch.ones(2, 32), router, 4, renormalizes=True, regime="generated")
    # The softmax of the others is nothing in float32: they are as good as one another.
    assert experts.tolist() == [[3, 0, 1, 2]] * 2
    assert weights[:, 0].tolist() == pytest.approx([1.0, 1.0])


def test_a_tokens_choice_is_the_same_bit_for_bit_whatever_its_mates() -> None:
    x, router = torch.randn(18, 700), torch.randn(20, 700)
    whole = route(x, router, 4, renormalizes=True, regime="generated")
    alone = route(x[17:18], router, 4, renormalizes=True, regime="generated")
    assert all(torch.equal(one, all_[17:18]) for one, all_ in zip(alone, whole, strict=True))
    none = route(x[:0], router, 4, renormalizes=True, regime="generated")
    assert none[0].shape == (0, 4)


def test_rows_are_added_as_their_gate_says() -> None:
    x, h, gate, residual = torch.randn(3, 1100), torch.randn(3, 1100), torch.randn(1100) / 10, torch.randn(3, 1100)
    expected = (h @ gate).sigmoid()[:, None] * x
    torch.testing.assert_close(gated_add(x, h, gate), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gated_add(x, h, gate, residual=residual), residual + expected, rtol=1e-5, atol=1e-6)
    expected += residual
    assert gated_add(x, h, gate, residual=residual, out=residual) is residual
    torch.testing.assert_close(residual, expected, rtol=1e-5, atol=1e-6)
    far = gated_add(x, h, torch.full((1100,), -1e4) * h[0].sign())[0]
    assert float(far.abs().max()) < 1e-30
    assert gated_add(x[:0], h[:0], gate).shape == (0, 1100)
