"""Rows of quantized tables under Triton's interpreter, against the plain decoder."""

from __future__ import annotations

from typing import get_args

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from raw_tensors import random_tensor  # noqa: E402

from naru_worker.adapters.ops.cuda.linear import embed  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import pack_matrix  # noqa: E402
from naru_worker.adapters.ops.protocol import TensorFormat  # noqa: E402
from naru_worker.adapters.ops.ref_dequant import dequantize  # noqa: E402


@pytest.mark.parametrize("tensor_format", get_args(TensorFormat))
@pytest.mark.parametrize("columns", [256, 1280])
def test_rows_are_those_of_the_decoded_table(columns: int, tensor_format: TensorFormat) -> None:
    part = random_tensor(tensor_format, 9, columns)
    table = pack_matrix([part], [None], torch.float32)
    ids = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    expected = torch.from_numpy(dequantize(part))[ids.long()]
    # Scales are rounded to 16 bits.
    bound = 2.0**-11 * float(expected.abs().max())
    torch.testing.assert_close(embed(ids, table, dtype=torch.float32), expected, rtol=0, atol=bound)
    assert embed(ids, table, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert embed(ids[:0], table, dtype=torch.float32).shape == (0, columns)


@pytest.mark.parametrize("tensor_format", ["q4_0", "q4_1", "q8_0"])
def test_a_last_chunk_that_is_not_full_ends_with_the_row(tensor_format: TensorFormat) -> None:
    part = random_tensor(tensor_format, 5, 96)
    rows = embed(torch.tensor([4], dtype=torch.int32), pack_matrix([part], [None], torch.float32), dtype=torch.float32)
    torch.testing.assert_close(rows[0], torch.from_numpy(dequantize(part))[4], rtol=0, atol=1e-6)
