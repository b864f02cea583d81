"""Rows of a weight, looked up by id: embeddings share the storage of the head, quantized or not."""

from __future__ import annotations

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.embed import embed
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
    if isinstance(segment, DenseRows):
        out = torch.empty((len(ids), table.num_columns), dtype=dtype, device=ids.device)
        return embed(ids, segment.values, out=out)
    return _decoded(segment, ids.clamp(0, table.num_rows - 1)).to(dtype)


def _decoded(rows: GroupRows, ids: Tensor) -> Tensor:
    """The rows' float32 values. Launches of torch's own: a few rows a step are no work."""
    kind, columns = rows.kind, rows.num_columns
    integers = rows.quants.index_select(1, ids)  # (chunks, M, bytes)
    if kind.bits == 4:
        integers = torch.cat([integers & 15, integers >> 4], dim=-1)
    values = integers.transpose(0, 1).flatten(1)[:, :columns].float() - kind.zero
    values *= _spread(rows.scales, ids, kind.group, columns)
    return values if rows.minimums is None else values + _spread(rows.minimums, ids, kind.group, columns)


def _spread(of_groups: Tensor, ids: Tensor, group: int, columns: int) -> Tensor:
    """Each group's number for all its columns, (M, columns) float32."""
    rows = of_groups.index_select(1, ids).T.float()
    return rows[:, :, None].expand(-1, -1, group).flatten(1)[:, :columns]
