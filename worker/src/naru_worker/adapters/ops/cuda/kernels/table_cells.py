"""Writes single numbers into a table on the device."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_CELLS = 512
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_cells"])
def _cells_kernel(table, cells, num_cells, CELLS: tl.constexpr):
    at = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    inside = at < num_cells
    place = tl.load(cells + at, mask=inside, other=0)
    value = tl.load(cells + num_cells + at, mask=inside, other=0)
    tl.store(table + place, value, mask=inside)


def write_cells(table: Tensor, cells: Tensor) -> None:
    """Puts each value at its place.

    Args:
        table: int32, contiguous, fewer than 2**31 numbers. Mutated.
        cells: (2, N) int32, contiguous: places in the table, counted row by row and none twice, and their values.
    """
    count = cells.shape[1]
    if count:
        _cells_kernel[(triton.cdiv(count, _CELLS),)](table, cells, count, CELLS=_CELLS, num_warps=_NUM_WARPS)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The kernel as it is launched on an architecture."""
    yield CompileCase(
        name="table_cells",
        kernel=_cells_kernel,
        arch=arch,
        signature={"table": "*i32", "cells": "*i32", "num_cells": "i32", "CELLS": "constexpr"},
        constexprs={"CELLS": _CELLS},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=("table", "cells"),
    )
