"""Rows of quantized tables under Triton's interpreter, against the plain decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from memory_models import random_tensor  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.embed_groups import embed_groups  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import pack_matrix  # noqa: E402
from naru_worker.adapters.ops.protocol import TensorFormat  # noqa: E402


def _table(tensor_format: TensorFormat, rows: int, columns: int) -> tuple[Any, Any]:
    part, values = random_tensor("table", tensor_format, (rows, columns), np.random.default_rng(columns))
    (segment,) = pack_matrix([part], [None], torch.float32).segments
    return segment, torch.from_numpy(values).float()


@pytest.mark.parametrize("tensor_format", ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "q4_g128", "e4m3_b32"])
@pytest.mark.parametrize("columns", [256, 1280])
def test_rows_are_those_of_the_decoded_table(columns: int, tensor_format: TensorFormat) -> None:
    table, values = _table(tensor_format, 9, columns)
    ids = torch.tensor([8, 0, 3, 3, 90, -1], dtype=torch.int32)
    # Scales are rounded to 16 bits.
    bound = 2.0**-11 * float(values.abs().max())
    rows = embed_groups(ids, table, dtype=torch.float32)
    torch.testing.assert_close(rows, values[[8, 0, 3, 3, 8, 0]], rtol=0, atol=bound)
    assert embed_groups(ids[:0], table, dtype=torch.bfloat16).shape == (0, columns)


@pytest.mark.parametrize("tensor_format", ["q4_0", "q4_1", "q8_0"])
def test_a_last_chunk_that_is_not_full_ends_with_the_row(tensor_format: TensorFormat) -> None:
    table, values = _table(tensor_format, 5, 96)
    rows = embed_groups(torch.tensor([4], dtype=torch.int32), table, dtype=torch.float32)
    torch.testing.assert_close(rows[0], values[4], rtol=0, atol=1e-6)
