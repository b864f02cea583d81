"""Norms, activations and looked up rows under Triton's interpreter, against `ref`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor, dtype

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.kernels.act import act  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.embed import add_rows, embed  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.norm import norm  # noqa: E402
from naru_worker.adapters.ops.protocol import KVConfig  # noqa: E402
from naru_worker.adapters.ops.ref import RefOps  # noqa: E402
from naru_worker.core.model_config import Activation, NormKind  # noqa: E402

REF = RefOps(KVConfig(1, 1, 1, 1, 1), torch.float32)


def assert_close(actual: Tensor, expected: Tensor, scales: Tensor | None) -> None:
    """Equal but for the last bits of the type; rows of fp8: to a sixteenth, or the step nearest zero."""
    if scales is not None:
        torch.testing.assert_close(scales, expected.float().abs().amax(1) / 448.0, rtol=2e-3, atol=1e-9)
        step = float(scales.max()) / 256
        torch.testing.assert_close(actual.float() * scales[:, None], expected.float(), rtol=0.07, atol=step)
    else:
        assert actual.dtype == expected.dtype
        is_half = expected.dtype == torch.float16
        torch.testing.assert_close(actual, expected, rtol=2e-3 if is_half else 1e-5, atol=2e-3 if is_half else 1e-5)


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [1, 100, 576, 2048])
def test_rows_are_normalised(width: int, kind: NormKind, dtype: dtype, quantizes: bool) -> None:
    torch.manual_seed(width)
    x = (torch.randn(3, width + 5) * 3 + 1).to(dtype)[:, :width]
    weight, bias = torch.randn(width), torch.randn(width) if kind == "layer" else None
    scales = torch.empty(3) if quantizes else None
    expected = REF.norm(x.float(), weight, bias, 1e-5, kind).to(dtype)
    assert_close(norm(x, weight, bias, 1e-5, kind, scales=scales), expected, scales)


def test_a_row_of_zeros_stays_zero_in_fp8() -> None:
    scales = torch.empty(2)
    out = norm(torch.tensor([[0.0] * 8, [1.0] * 8]), torch.ones(8), None, 1e-6, "rms", scales=scales)
    assert torch.equal(out.float()[0], torch.zeros(8)) and scales[0] == 0.0
    assert torch.equal(out.float()[1], torch.full((8,), 448.0))


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("width", "dtype"), [(6, torch.float32), (1100, torch.float16), (4100, torch.float32)])
def test_activations_follow_their_formulas(width: int, dtype: dtype, kind: Activation, quantizes: bool) -> None:
    torch.manual_seed(width)
    x = (torch.randn(2, 2 * width + 4) * 4).to(dtype)[:, : 2 * width if kind == "swiglu" else width]
    x[0, :3] = torch.tensor([-100.0, 100.0, 0.0], dtype=dtype)
    scales = torch.empty(2) if quantizes else None
    expected = REF.act(x.float(), kind).to(dtype)
    assert_close(act(x, kind, scales=scales), expected, scales)


@pytest.mark.parametrize("width", [8, 1030])
def test_rows_are_looked_up_and_ids_beyond_the_table_are_clamped(width: int) -> None:
    table, positions = torch.randn(5, width), torch.randn(7, width)
    ids = torch.tensor([4, 0, 5, -1, 2**31 - 1], dtype=torch.int32)
    places = torch.tensor([0, 6, 7, -3, 1], dtype=torch.int32)
    clamped = table[[4, 0, 4, 0, 4]]
    assert torch.equal(embed(ids, table), clamped)
    x = embed(ids, table)
    assert add_rows(x, places, positions) is x
    assert torch.equal(x, clamped + positions[[0, 6, 6, 0, 1]])
    halves = embed(ids, table, out=torch.empty(5, width, dtype=torch.float16))
    assert torch.equal(halves, clamped.half())


def test_no_rows_launch_nothing() -> None:
    nothing = torch.empty(0, 8)
    assert norm(nothing, torch.ones(8), None, 1e-6, "rms").shape == (0, 8)
    assert act(nothing, "swiglu").shape == (0, 4)
    assert embed(torch.empty(0, dtype=torch.int32), torch.ones(3, 8)).shape == (0, 8)
