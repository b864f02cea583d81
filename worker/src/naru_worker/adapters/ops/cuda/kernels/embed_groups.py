"""Rows of a table that is quantized in groups, decoded: embeddings whose table is the head, too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.group_layout import KINDS, GroupRows, quants_to_floats

_CHUNKS = 16
"""Chunks of one row that one program decodes."""
_NUM_WARPS = 4


@triton.jit(do_not_specialize=("num_chunks", "num_groups", "group_bits"))
def _embed_kernel(
    ids, quants, scales, minimums, out, num_rows, num_columns, num_chunks, num_groups, group_bits, out_stride,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, IS_ROW: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), num_rows - 1)
    chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    elements = tl.arange(0, CHUNK)
    at = (chunks.to(tl.int64) * num_rows + row)[:, None] * CHUNK + elements[None, :]
    packed = tl.load(quants + at, mask=(chunks < num_chunks)[:, None], other=0)
    for half in tl.static_range(8 // BITS):
        first = (chunks * (8 // BITS) + half) * CHUNK
        groups = first >> group_bits
        integers = packed
        if BITS == 4:
            integers = (packed >> (4 * half)) & 15
        values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, tl.float32)
        values *= tl.load(scales + groups * num_rows + row, mask=groups < num_groups, other=0.0).to(tl.float32)[:, None]
        if HAS_MINIMUM:
            minimum = tl.load(minimums + groups * num_rows + row, mask=groups < num_groups, other=0.0)
            values += minimum.to(tl.float32)[:, None]
        columns = first[:, None] + elements[None, :]
        tl.store(out + token * out_stride + columns, values.to(out.dtype.element_ty), mask=columns < num_columns)


def embed_groups(ids: Tensor, table: GroupRows, *, dtype: torch.dtype, arch: int = 80) -> Tensor:
    """The values of some rows.

    Args:
        ids: (M,), int32, contiguous; those beyond the table are clamped.
        table: On the same device.
        dtype: Of the result.
        arch: One of `ARCHITECTURES`; all run with the same tiles.

    Returns:
        (M, num_columns).
    """
    kind = table.kind
    out = torch.empty((len(ids), table.num_columns), dtype=dtype, device=ids.device)
    if len(ids) == 0:
        return out
    chunks = kind.num_chunks(table.num_columns)
    _embed_kernel[(len(ids), triton.cdiv(chunks, _CHUNKS))](
        ids, table.quants, table.scales, table.scales if table.minimums is None else table.minimums, out,
        table.num_rows, table.num_columns, chunks, kind.num_groups(table.num_columns), kind.group_bits,
        out.stride(0),
        **kind.constants, CHUNKS=_CHUNKS, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """All kinds of tables; groups of 64 and 128 run as those of 32 do."""
    sizes = ("num_rows", "num_columns", "num_chunks", "num_groups", "group_bits", "out_stride")
    for dtype in ("fp16", "bf16"):
        for kind in (kind for kind in KINDS if kind.group <= 32):
            constants = kind.constants | {"CHUNKS": _CHUNKS}
            scale = "*fp32" if kind.is_float else "*fp16"
            yield CompileCase(
                name=f"embed_groups/{dtype}/{kind.name}",
                kernel=_embed_kernel,
                arch=arch,
                signature={
                    **{"ids": "*i32", "quants": "*u8", "scales": scale, "minimums": scale, "out": f"*{dtype}"},
                    **dict.fromkeys(sizes, "i32"),
                    **dict.fromkeys(constants, "constexpr"),
                },
                constexprs=constants,
                num_warps=_NUM_WARPS,
                num_stages=3,
                aligned=("ids", "quants", "scales", "minimums", "out", "num_rows", "num_columns", "out_stride"),
            )
