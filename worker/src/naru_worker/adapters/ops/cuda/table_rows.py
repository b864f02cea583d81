"""Rows of a weight, looked up by id: embeddings share the storage of the head, quantized or not."""

from __future__ import annotations

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.embed import add_rows, embed
from naru_worker.adapters.ops.cuda.kernels.embed_groups import embed_groups
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import Fp8Rows
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupRows
from naru_worker.adapters.ops.cuda.weights import DenseRows, LinearWeight


def table_rows(table: LinearWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, num_columns) of `dtype`. Ids beyond the table are clamped.

    Args:
        table: Of one segment.
        ids: (M,) int32, on the table's device.
        dtype: Of the activations.
    """
    (segment,) = table.segments
    assert not isinstance(segment, Fp8Rows), "checkpoints have no tables of 8-bit floats"
    if isinstance(segment, GroupRows):
        return embed_groups(ids, segment, dtype=dtype)
    out = torch.empty((len(ids), table.num_columns), dtype=dtype, device=ids.device)
    return embed(ids, segment.values, out=out)


def add_table_rows(x: Tensor, table: LinearWeight, ids: Tensor) -> Tensor:
    """Adds to each row of x (M, num_columns), in place, the row of the table that its id names; returns x."""
    (segment,) = table.segments
    if isinstance(segment, DenseRows):
        return add_rows(x, ids, segment.values)
    return x.add_(table_rows(table, ids, x.dtype))
