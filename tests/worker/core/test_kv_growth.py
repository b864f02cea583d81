"""Sizes of a growing KV cache, known before anything is loaded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_worker.core.kv_growth import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, chunk_blocks, kv_floor_blocks, kv_layout


@settings(deadline=None)
@given(st.integers(1, 64), st.sampled_from([32, 64, 128]), st.integers(1, 16), st.sampled_from([16, 32]))
def test_a_chunk_of_a_real_geometry_is_whole_pages_of_2_to_4_mib(
    num_layers: int, head_dim: int, num_kv_heads: int, block_size: int
) -> None:
    block_bytes = 2 * 2 * num_layers * head_dim * num_kv_heads * block_size
    num_bytes = chunk_blocks(block_bytes) * block_bytes
    if block_bytes <= MIN_CHUNK_BYTES:
        assert num_bytes % 4096 == 0
        assert MIN_CHUNK_BYTES <= num_bytes <= MAX_CHUNK_BYTES
    else:
        assert chunk_blocks(block_bytes) == 1


@settings(deadline=None)
@given(st.integers(1, 1 << 26))
def test_any_block_has_a_chunk_that_is_never_far_above_4_mib(block_bytes: int) -> None:
    blocks = chunk_blocks(block_bytes)
    assert blocks >= 1
    assert blocks == 1 or blocks * block_bytes <= MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "blocks"), [(8192, 16, 33), (512, 16, 33), (100, 16, 8), (1, 16, 2), (8192, 1, 513)]
)
def test_the_floor_holds_one_sequence_of_modest_length(max_model_len: int, block_size: int, blocks: int) -> None:
    assert kv_floor_blocks(max_model_len, block_size) == blocks


@settings(deadline=None)
@given(st.integers(1, 1 << 24), st.integers(2, 5000), st.integers(0, 6000))
def test_chunks_cover_all_blocks_and_the_floor_is_among_them(
    block_bytes: int, num_blocks: int, floor_blocks: int
) -> None:
    layout = kv_layout(block_bytes, num_blocks, floor_blocks)
    assert (layout.num_chunks - 1) * layout.chunk_blocks < num_blocks <= layout.num_chunks * layout.chunk_blocks
    assert 1 <= layout.floor_chunks <= layout.num_chunks
    assert layout.floor_chunks * layout.chunk_blocks >= min(num_blocks, max(floor_blocks, 2))
    assert layout.bytes_of(layout.num_chunks, with_last=True) == num_blocks * block_bytes
    assert layout.floor_bytes == min(num_blocks, layout.floor_chunks * layout.chunk_blocks) * block_bytes


def test_a_small_cache_is_one_chunk_of_just_its_size() -> None:
    layout = kv_layout(100, 17, 3)
    assert (layout.num_chunks, layout.floor_chunks, layout.floor_bytes) == (1, 1, 1700)


@pytest.mark.parametrize(("block_bytes", "num_blocks"), [(0, 10), (100, 1)])
def test_a_cache_of_nothing_is_refused(block_bytes: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"num_blocks is {num_blocks} and kv_block_bytes {block_bytes}"):
        kv_layout(block_bytes, num_blocks, 2)
