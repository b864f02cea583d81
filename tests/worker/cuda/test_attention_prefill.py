"""Attention of prompt chunks under Triton's interpreter, against plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from naru_worker.adapters.ops.cuda.kernels.attention_prefill import attention_prefill, compile_cases  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.compile_case import ARCHITECTURES  # noqa: E402

SCALE = 0.2


def computed(case: PagedCase, window: int | None, *, arch: int = 80) -> Tensor:
    """Rows that nobody asks for stay NaN."""
    num_rows, num_heads, head_dim = case.q.shape
    wide: Tensor = torch.full((num_rows, 2 * num_heads, head_dim), math.nan, dtype=case.q.dtype)
    out = wide[:, :num_heads]
    longest = int(case.query_start.diff().max())
    attention_prefill(
        case.q,
        case.key_cache,
        case.value_cache,
        case.block_table,
        case.query_start,
        case.seq_lens,
        out,
        scale=SCALE,
        window=window,
        max_query_len=longest,
        key_scales=case.key_scales,
        value_scales=case.value_scales,
        arch=arch,
    )
    return out


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "window", "type_name", "arch"),
    [
        (1, 32, 16, None, "float32", 80),
        (2, 64, 32, None, "float16", 80),
        (4, 128, 16, None, "float16", 90),
        (3, 80, 16, 17, "float32", 80),
        (7, 96, 64, 1, "float32", 90),
        (8, 256, 32, 64, "float16", 90),
    ],
)
def test_every_row_sees_its_past_up_to_the_window_and_no_garbage(
    group: int, head_dim: int, block_size: int, window: int | None, type_name: str, arch: int
) -> None:
    seq_lens = [1, block_size - 1, block_size, block_size + 1, 0, 64, 65, 130, 129]
    query_lens = [1, block_size - 1, 2, block_size + 1, 0, 1, 65, 3, 70]
    case = paged_case(
        seq_lens,
        query_lens,
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        dtype=getattr(torch, type_name),
    )
    assert_attended(computed(case, window, arch=arch), case, SCALE, window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8, E4M3])
def test_the_cache_may_hold_other_numbers_than_the_queries(kv_dtype: dtype, arch: int) -> None:
    case = paged_case([97, 33], [40, 33], dtype=torch.float16, kv_dtype=kv_dtype)
    assert_attended(computed(case, None, arch=arch), case, SCALE, None)


def test_values_far_from_one_survive_their_scales() -> None:
    case = paged_case([90], [90], dtype=torch.float16, kv_dtype=torch.int8)
    assert case.value_scales is not None
    case.value_scales.mul_(1e-3)
    small = computed(case, None).float() * 1e3
    torch.testing.assert_close(small, case.expected(SCALE, None), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_any_chunk_and_company(window: int | None) -> None:
    whole = paged_case([150, 40], [150, 40], group=3, window=window)
    bits = computed(whole, window)

    def part(sequences: Sequence[int], seq_lens: Sequence[int], rows: Sequence[range]) -> Tensor:
        starts = torch.tensor([0, *(len(r) for r in rows)], dtype=torch.int32).cumsum(0).int()
        return computed(
            PagedCase(
                q=torch.cat([whole.q[r.start : r.stop] for r in rows]),
                key_cache=whole.key_cache,
                value_cache=whole.value_cache,
                key_scales=None,
                value_scales=None,
                block_table=whole.block_table[list(sequences)],
                query_start=starts,
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
                keys=[],
                values=[],
            ),
            window,
        )

    assert torch.equal(part([1], [40], [range(150, 190)]), bits[150:])
    assert torch.equal(part([0], [77], [range(77)]), bits[:77])
    assert torch.equal(part([1, 0], [40, 150], [range(189, 190), range(77, 150)]), bits[[189, *range(77, 150)]])


def test_rows_outside_the_sequences_are_left_alone() -> None:
    case = paged_case([20, 30], [20, 30])
    part = PagedCase(
        q=case.q,
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        key_scales=None,
        value_scales=None,
        block_table=case.block_table[1:],
        query_start=torch.tensor([20, 45], dtype=torch.int32),
        seq_lens=torch.tensor([25], dtype=torch.int32),
        keys=[],
        values=[],
    )
    out = computed(part, None)
    assert out[:20].isnan().all()
    assert out[45:].isnan().all()
    torch.testing.assert_close(out[20:45], case.expected(SCALE, None)[20:45], atol=1e-5, rtol=1e-5)


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 50)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 140),
    seed=st.integers(0, 99),
)
def test_any_batch_is_right(
    lengths: list[tuple[int, int]], group: int, block_size: int, window: int | None, seed: int
) -> None:
    case = paged_case(
        [cached + new for cached, new in lengths],
        [new for _, new in lengths],
        num_kv_heads=1,
        group=group,
        block_size=block_size,
        window=window,
        seed=seed,
    )
    assert_attended(computed(case, window), case, SCALE, window)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_case_of_compilation_has_its_own_name(arch: int) -> None:
    names = [case.name for case in compile_cases(arch)]
    assert len(names) == len(set(names)) > 20
