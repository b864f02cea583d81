"""What ranks exchange in a step: sums of activations, and the logits, over torch.distributed.

Sums are added up in the order of the ranks, element by element, whatever the size: all ranks get the same bits, and
what a token gets does not depend on who else is in its batch. (An all-reduce adds in an order that depends on where in
the buffer an element lies.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from naru_worker.adapters.ops.tensor_parallel.errors import CollectiveFailed
from naru_worker.core.group_sizes import group_sizes

SMALL_BYTES = 1 << 18
"""Up to here everybody sends all it has to everybody: one exchange instead of two, with more bytes."""


class Collectives(Protocol):
    """The exchanges of one rank; all ranks call the same ones in the same order."""

    rank: int
    size: int
    num_begun: int
    """Exchanges so far, the present one included."""

    def add(self, partial: Tensor, residual: Tensor) -> Tensor:
        """(M, width): the ranks' `partial` added up, then `residual`, which all have alike; rounded once, at the end.

        Raises:
            CollectiveFailed: a rank is gone or late.
        """

    def gather_columns(self, columns: Tensor, num_columns: int) -> Tensor | None:
        """(R, num_columns) of all ranks' columns side by side on rank 0, None elsewhere.

        Each rank has as many as `sharding` gives it of `num_columns`.

        Raises:
            CollectiveFailed: a rank is gone or late.
        """


class TorchCollectives:
    """Over a process group of torch.distributed, gloo or NCCL. Can be recorded into a CUDA graph on NCCL."""

    def __init__(self, rank: int, size: int) -> None:
        """Of the first `size` ranks."""
        self.rank = rank
        self.size = size
        self.num_begun = 0
        self.group: Any = None
        """torch's process group of these ranks; None: the default one. Set before the first exchange."""

    def add(self, partial: Tensor, residual: Tensor) -> Tensor:
        """The sum over the ranks and the residual."""
        self.num_begun += 1
        partial, residual = partial.contiguous(), residual.contiguous()
        try:
            if partial.nbytes <= SMALL_BYTES:
                return self._add_all(partial, residual)
            return self._add_by_parts(partial, residual)
        except RuntimeError as exc:
            raise CollectiveFailed(str(exc)) from exc

    def gather_columns(self, columns: Tensor, num_columns: int) -> Tensor | None:
        """All columns on rank 0."""
        if not len(columns):  # pieces of prompts alone: all ranks know it, and not every transport sends nothing
            return columns.new_empty(0, num_columns) if self.rank == 0 else None
        self.num_begun += 1
        # Messages are of one size: the ranks with one column less send one more.
        width = -(-num_columns // self.size)
        padded = torch.nn.functional.pad(columns, (0, width - columns.shape[1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        try:
            dist.gather(padded, pieces, dst=0, group=self.group)
        except RuntimeError as exc:
            raise CollectiveFailed(str(exc)) from exc
        if pieces is None:
            return None
        full = num_columns % self.size or self.size
        return torch.cat([piece[:, : width - (i >= full)] for i, piece in enumerate(pieces)], dim=1)

    def _add_all(self, partial: Tensor, residual: Tensor) -> Tensor:
        pieces = partial.new_empty((self.size, *partial.shape))
        dist.all_gather_into_tensor(pieces.view(-1), partial.view(-1), group=self.group)
        return _added(pieces, residual)

    def _add_by_parts(self, partial: Tensor, residual: Tensor) -> Tensor:
        """Each rank adds up one part of the elements, then all tell all."""
        count = partial.numel()
        part = -(-count // self.size)
        num_missing = part * self.size - count
        sent = torch.nn.functional.pad(partial.view(-1), (0, num_missing))
        pieces = torch.empty_like(sent)
        dist.all_to_all_single(pieces, sent, group=self.group)
        added_to = torch.nn.functional.pad(residual.view(-1), (0, num_missing))
        mine = _added(pieces.view(self.size, part), added_to[self.rank * part : (self.rank + 1) * part])
        sums = mine.new_empty(part * self.size)
        dist.all_gather_into_tensor(sums, mine, group=self.group)
        return sums[:count].view(partial.shape)


def make_collectives(rank: int, num_ranks: int) -> dict[int, TorchCollectives]:
    """A rank's exchanges by the size of their group, of all groups that it is in."""
    return {size: TorchCollectives(rank, size) for size in group_sizes(num_ranks) if size > max(1, rank)}


def workspace_bytes(num_tokens: int, width: int, num_rows: int, num_columns: int, element_bytes: int) -> int:
    """About what the largest exchanges of a step take beside their results."""
    # Of a sum: sent, received, and the residual padded. Of the head's columns: pieces, and all of them side by side.
    return (3 * num_tokens * width + 2 * num_rows * num_columns) * element_bytes


def _added(pieces: Tensor, residual: Tensor) -> Tensor:
    """The sum over the first axis, from first to last, then the residual; of 16-bit numbers in float32."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece
    return (total + residual).to(residual.dtype)
