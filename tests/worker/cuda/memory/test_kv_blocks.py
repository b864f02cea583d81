"""Blocks of a KV cache over an arena: there before a step writes them, gone when they are given up."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda_memory import FakeCudaMemory
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.adapters.ops.cuda.memory.arena import MappedArena
from naru_worker.adapters.ops.cuda.memory.byte_ranges import ByteRanges
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool
from naru_worker.adapters.ops.cuda.memory.errors import OutOfDeviceMemory
from naru_worker.adapters.ops.cuda.memory.kv_blocks import KVBlocks
from naru_worker.adapters.ops.protocol import BatchInputs, Int32Array

CHUNK, BLOCK, BLOCK_SIZE = 64, 24, 4


def blocks_over(num_chunks: int, num_blocks: int = 20) -> tuple[FakeCudaMemory, KVBlocks]:
    fake = FakeCudaMemory(granularity=CHUNK)
    pool = ChunkPool(fake, num_chunks * CHUNK, chunk_bytes=CHUNK)
    return fake, KVBlocks(MappedArena(pool, num_blocks * BLOCK), num_blocks, BLOCK)


def batch_writing(slots: list[int], copies: list[list[int]]) -> BatchInputs:
    def i32(*values: int) -> Int32Array:
        return np.array(values, np.int32)

    return BatchInputs(
        token_ids=i32(*slots),
        positions=i32(*slots),
        slots=i32(*slots),
        query_start=i32(0, len(slots)),
        seq_lens=i32(len(slots)),
        block_table=i32(0).reshape(1, 1),
        logits_rows=i32(),
        copies=i32(*(block for pair in copies for block in pair)).reshape(-1, 2),
    )


def test_a_step_has_memory_for_what_it_writes_and_copies_and_padding_rows_ask_for_none() -> None:
    fake, blocks = blocks_over(8)
    assert blocks.arena.mapped_bytes == CHUNK, "the null block is read where a table has none"
    blocks.ensure_for(batch_writing([9 * BLOCK_SIZE + 3, 10 * BLOCK_SIZE, -1], [[9, 19]]), BLOCK_SIZE)
    base = blocks.arena.address  # type: ignore[attr-defined]
    for block in (0, 9, 10, 19):
        fake.write(base + block * BLOCK, b"k" * BLOCK)
    assert blocks.arena.mapped_bytes == 4 * CHUNK, "of the null block; of 9 and 10, which lie in two; of 19"
    fake.calls.clear()
    blocks.ensure_for(batch_writing([-1, 9 * BLOCK_SIZE], []), BLOCK_SIZE)
    assert fake.calls == [], "a step whose blocks are there does not ask the device"


def test_blocks_given_up_come_back_when_they_are_written_again_and_the_null_block_stays() -> None:
    fake, blocks = blocks_over(8)
    blocks.ensure(np.arange(20))
    assert blocks.release(0, 20) == 7 * CHUNK
    assert blocks.arena.mapped_bytes == CHUNK
    assert blocks.release(0, 1) == 0
    blocks.ensure(np.array([7, 3], np.int32))
    assert blocks.arena.used_bytes == 3 * BLOCK
    with pytest.raises(ValueError, match=r"\[19, 21\) lie outside the 20"):
        blocks.release(19, 2)
    with pytest.raises(ValueError, match="do not fit"):
        KVBlocks(blocks.arena, 22, BLOCK)
    assert len(fake.mappings) * CHUNK == blocks.arena.mapped_bytes


def test_blocks_that_found_no_room_are_asked_for_again_in_the_next_step() -> None:
    _, blocks = blocks_over(2)
    for _ in range(2):
        with pytest.raises(OutOfDeviceMemory):
            blocks.ensure(np.array([18, 19], np.int32))
    assert blocks.arena.mapped_bytes == CHUNK


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(-2, 30)), max_size=12), st.data())
def test_ranges_are_a_set_of_bytes(edits: list[tuple[bool, int, int]], data: st.DataObject) -> None:
    ranges, expected = ByteRanges(), set[int]()
    for is_added, start, stop in edits:
        positions = set(range(start, stop))
        if is_added:
            ranges.add(start, stop)
            expected |= positions
        else:
            ranges.remove(start, stop)
            expected -= positions
    assert set().union(*(range(a, b) for a, b in ranges)) == expected
    assert ranges.num_bytes == len(expected)
    flat = [edge for pair in ranges for edge in pair]
    assert flat == sorted(set(flat)), "disjoint, ascending, none touch"
    start, stop = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    asked = set(range(start, stop))
    assert ranges.touches(start, stop) == bool(asked & expected)
    assert ranges.covers(start, stop) == (asked <= expected)
