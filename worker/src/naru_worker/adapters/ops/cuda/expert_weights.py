"""Weights of experts on the GPU: all experts of a layer as one matrix, and its bytes beforehand.

Called when a runner is made from a checkpoint, as `weights` is for linear layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cuda.block_formats import KIND_OF_FORMAT
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupRows
from naru_worker.adapters.ops.cuda.weights import DenseRows, pack_matrix, packed_bytes
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.ops.ref_dequant import dequantize

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """One linear layer of every expert: all experts' rows of one kind, one expert below the other."""

    num_experts: int
    rows: DenseRows | GroupRows

    @property
    def operand(self) -> Tensor | GroupRows:
        """As the grouped product takes it: (num_experts, rows, columns), or quantized rows."""
        if isinstance(self.rows, GroupRows):
            return self.rows
        return self.rows.values.view(self.num_experts, -1, self.rows.values.shape[1])

    def placed(self, place: Callable[[Tensor], Tensor]) -> ExpertRows:
        """The same with each tensor where `place` puts it."""
        return replace(self, rows=self.rows.placed(place))


def pack_experts(experts: Sequence[Sequence[RawTensor]], dtype: torch.dtype) -> ExpertRows:
    """Stacks all parts of all experts. Formats of different kinds are widened to `dtype`, which the log says.

    Args:
        experts: The parts of each; experts have parts of the same shapes.
        dtype: The type of the activations.

    Returns:
        Tensors on the CPU, which share nothing with the parts.

    Raises:
        LoadError: the parts do not fit one another, or a value does not fit its type.
    """
    parts = _flat(experts)
    if _is_mixed(parts):
        formats = sorted({part.format for part in parts})
        _log.warning(
            "experts' weights from %s on are of several formats (%s): they are widened to 16 bits",
            parts[0].name, ", ".join(formats),
        )  # fmt: skip
        parts = [_widened(part) for part in parts]
    [rows] = pack_matrix(parts, [None] * len(parts), dtype).segments
    # No other kind is made unless a GPU's own FP8 products are asked for.
    assert isinstance(rows, DenseRows | GroupRows)
    return ExpertRows(len(experts), rows)


def expert_bytes(experts: Sequence[Sequence[RawTensor]], dtype: torch.dtype) -> int:
    """Bytes of the tensors that `pack_experts` makes, from formats and shapes alone.

    Raises:
        LoadError: the parts do not fit one another.
    """
    parts = _flat(experts)
    taken = packed_bytes(parts, [None] * len(parts), dtype)
    return sum(part.shape[0] * part.shape[1] for part in parts) * dtype.itemsize if _is_mixed(parts) else taken


def _flat(experts: Sequence[Sequence[RawTensor]]) -> list[RawTensor]:
    shapes = {tuple(part.shape for part in parts) for parts in experts}
    if len(shapes) != 1:
        raise LoadError(f"experts beside {experts[0][0].name!r} have different shapes: {sorted(shapes)}")
    return [part for parts in experts for part in parts]


def _is_mixed(parts: Sequence[RawTensor]) -> bool:
    return len({KIND_OF_FORMAT.get(part.format) for part in parts}) > 1


def _widened(part: RawTensor) -> RawTensor:
    return RawTensor(part.name, "f32", part.shape, dequantize(part).data.cast("B").toreadonly())
