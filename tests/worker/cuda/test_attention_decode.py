"""Attention of generated tokens under Triton's interpreter, against plain torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from torch import Tensor, dtype

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from paged_attention import E4M3, PagedCase, assert_attended, paged_case  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.attention_decode import (  # noqa: E402
    attention_decode,
    compile_cases,
    decode_partials_shape,
    packed_tokens,
    split_count,
    split_tokens,
    tile_tokens,
)
from naru_worker.adapters.ops.cuda.kernels.compile_case import ARCHITECTURES  # noqa: E402

SCALE = 0.2


def row_lens(case: PagedCase) -> Tensor:
    """Tokens that each row sees."""
    found = []
    for length, count in zip(case.seq_lens.tolist(), case.query_start.diff().tolist(), strict=True):
        found += [max(0, length - count + 1 + i) for i in range(count)]
    lens: Tensor = torch.tensor(found, dtype=torch.int32)
    return lens


def computed(
    case: PagedCase, window: int | None = None, *, rows: int = 1, num_splits: int = 0, arch: int = 80
) -> Tensor:
    """With the splits that the longest sequence needs, if not told."""
    num_rows, num_heads, head_dim = case.q.shape
    wide: Tensor = torch.full((num_rows, 2 * num_heads, head_dim), math.nan, dtype=case.q.dtype)
    out = wide[:, :num_heads]
    split = split_tokens(case.q.shape[2], case.key_cache.itemsize)
    needed = split_count(int(case.seq_lens.max()), split, window=window, most_rows=rows)
    num_splits = num_splits or needed
    assert num_splits >= needed
    attention_decode(
        case.q,
        case.key_cache,
        case.value_cache,
        case.block_table,
        torch.arange(len(case.seq_lens), dtype=torch.int32),
        case.query_start,
        row_lens(case),
        out,
        torch.full(decode_partials_shape(len(case.q), case.q.shape[1], case.q.shape[2], num_splits), math.nan),
        scale=SCALE,
        window=window,
        num_splits=num_splits,
        most_rows=rows,
        key_scales=case.key_scales,
        value_scales=case.value_scales,
        arch=arch,
    )
    return out


def decode_case(seq_lens: list[int], *, rows: int = 1, **options: object) -> PagedCase:
    return paged_case(seq_lens, [rows] * len(seq_lens), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "window", "type_name", "arch"),
    [
        (1, 64, 16, None, "float32", 80),
        (2, 128, 32, None, "float16", 90),
        (4, 256, 64, None, "float16", 90),
        (3, 80, 16, 17, "float32", 80),
        (7, 96, 64, 1, "float32", 90),
        (8, 32, 32, 300, "float16", 80),
    ],
)
def test_a_token_sees_its_past_up_to_the_window_and_no_garbage(
    group: int, head_dim: int, block_size: int, window: int | None, type_name: str, arch: int
) -> None:
    split = split_tokens(head_dim, getattr(torch, type_name).itemsize)
    seq_lens = [1, block_size - 1, block_size, block_size + 1, 0, split - 1, split, split + 1, 2 * split + 65]
    case = decode_case(
        seq_lens,
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        dtype=getattr(torch, type_name),
    )
    assert_attended(computed(case, window, arch=arch), case, SCALE, window)


@pytest.mark.parametrize(("group", "rows", "window"), [(3, 5, None), (2, 4, 17), (8, 9, None)])
def test_drafted_tokens_see_those_before_them(group: int, rows: int, window: int | None) -> None:
    split = split_tokens(32, 4)
    seq_lens = [rows, rows + 1, split + 1, split + rows + 1]
    case = decode_case(seq_lens if rows < 9 else seq_lens[2:3], rows=rows, group=group, window=window, num_kv_heads=1)
    assert_attended(computed(case, window, rows=rows), case, SCALE, window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8, E4M3])
def test_the_cache_may_hold_other_numbers_than_the_queries(kv_dtype: dtype, arch: int) -> None:
    split = split_tokens(32, kv_dtype.itemsize)
    case = decode_case([97, split + 40], dtype=torch.float16, kv_dtype=kv_dtype)
    assert_attended(computed(case, arch=arch), case, SCALE, None)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    split = split_tokens(32, 4)
    case = decode_case([split + 30, 40, 0, 2 * split + 1], group=3)
    bits = computed(case)
    for s, length in enumerate(case.seq_lens.tolist()):
        alone = replace(
            case,
            q=case.q[s : s + 1],
            block_table=case.block_table[s : s + 1],
            seq_lens=case.seq_lens[s : s + 1],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(computed(alone), bits[s : s + 1]), length
        assert torch.equal(computed(alone, num_splits=7), bits[s : s + 1]), length


@pytest.mark.parametrize("window", [None, 40])
def test_runs_of_any_lengths_have_the_bits_of_their_rows_alone(window: int | None) -> None:
    """Sequences on lines out of order, runs that end behind a split's first tokens, and runs without rows."""
    split = split_tokens(32, 4)
    counts, lens = [3, 1, 6, 2], [split + 2, 40, 2 * split + 1, 9]
    case = paged_case(lens, counts, group=3, window=window)
    lines = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    table = torch.zeros_like(case.block_table)
    table[lines.long()] = case.block_table
    seen = row_lens(case)

    def attended(run_lines: Tensor, run_start: Tensor) -> Tensor:
        out: Tensor = torch.full_like(case.q, math.nan)
        num_rows, num_heads, head_dim = case.q.shape
        partials = torch.full(decode_partials_shape(num_rows, num_heads, head_dim, 3), math.nan)
        attention_decode(
            case.q, case.key_cache, case.value_cache, table, run_lines, run_start, seen, out, partials,
            scale=SCALE, window=window, num_splits=3, most_rows=6,
        )  # fmt: skip
        return out

    none = torch.zeros(2, dtype=torch.int32)
    packed = attended(torch.cat([lines, none]), torch.cat([case.query_start, none + len(seen)]))
    # On the same tile: the interpreter's products, unlike a GPU's, depend on its size.
    own_lines = lines.repeat_interleave(torch.tensor(counts))
    single = attended(own_lines, torch.arange(len(seen) + 1, dtype=torch.int32))
    assert torch.equal(packed, single)
    assert_attended(packed, case, SCALE, window)


def test_a_tile_takes_as_many_tokens_as_it_has_places() -> None:
    assert [tile_tokens(count, 4) for count in (1, 4, 5, 9, packed_tokens(4))] == [4, 4, 8, 16, 16]
    assert [tile_tokens(count, 3) for count in (1, 6, packed_tokens(3))] == [5, 10, 21]
    assert (packed_tokens(71), tile_tokens(1, 71)) == (1, 1)


def test_a_window_bounds_the_splits() -> None:
    window, split = 40, split_tokens(32, 4)
    case = decode_case([split + 20, 3 * split, 5 * split + 1], window=window, num_kv_heads=1)
    assert split_count(5 * split + 1, split, window=window) == 2
    assert split_count(split, split, window=window) == 1
    assert split_count(5 * split + 1, split) == 6
    assert split_count(0, split) == 1
    assert_attended(computed(case, window, num_splits=2), case, SCALE, window)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_gives_zeros_whatever_the_cache_holds(num_splits: int) -> None:
    case = decode_case([0, 0, 5], rows=2)
    case.key_cache.fill_(math.nan)
    case.value_cache.fill_(math.nan)
    assert (computed(case, rows=2, num_splits=num_splits)[:4] == 0.0).all()


@settings(max_examples=4, deadline=None)
@given(
    seq_lens=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    rows=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_any_batch_is_right(
    seq_lens: list[int], rows: int, group: int, block_size: int, window: int | None, seed: int
) -> None:
    case = decode_case(
        [length and max(length, rows) for length in seq_lens],
        rows=rows,
        num_kv_heads=1,
        group=group,
        block_size=block_size,
        window=window,
        seed=seed,
    )
    assert_attended(computed(case, window, rows=rows), case, SCALE, window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_case_of_compilation_has_its_own_name(arch: int) -> None:
    names = [case.name for case in compile_cases(arch)]
    assert len(names) == len(set(names)) > 20
