"""The block pool with memory that comes and goes: in which order blocks are given out, and what is given up."""

from __future__ import annotations

import pytest
from growth import Grants
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from naru_worker.core.blocks import Block, BlockPool


def make_pool(num_blocks: int, growth: Grants) -> tuple[BlockPool, list[bytes]]:
    evicted: list[bytes] = []

    def evict(block: Block) -> None:
        assert block.block_hash is not None
        evicted.append(block.block_hash)
        block.block_hash = None

    return BlockPool(num_blocks, evict, growth), evicted


def take(pool: BlockPool, num_blocks: int) -> list[Block]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    pool.check()
    return blocks


def keep(pool: BlockPool, blocks: list[Block]) -> None:
    """Releases blocks with content."""
    for block in blocks:
        block.block_hash = b"%d" % block.block_id
        pool.release(block)
    pool.check()


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_pool_begins_with_its_floor() -> None:
    pool, _ = make_pool(20, Grants(floor_chunks=2))
    assert (pool.num_usable, pool.num_free, pool.max_usable) == (7, 7, 19)
    assert pool.free_ids() == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_reclaimable_chunks == 0


def test_a_floor_without_a_block_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match="no block to give"):
        make_pool(5, Grants(chunk_blocks=1, floor_chunks=1))


def test_empty_blocks_go_first_then_plentiful_memory_then_own_content_then_urgent_memory() -> None:
    growth = Grants(plenty=0, most=9)
    pool, evicted = make_pool(40, growth)
    keep(pool, take(pool, 2))
    assert ids(take(pool, 1)) == [3]
    assert growth.asked == []
    growth.plenty = 1
    assert ids(take(pool, 1)) == [4]
    assert (growth.asked, evicted) == ([(1, False)], [])
    assert ids(take(pool, 4)) == [5, 6, 7, 1]
    assert (growth.asked[1:], evicted) == ([(1, False)], [b"1"])
    assert ids(take(pool, 3)) == [8, 9, 10]
    assert growth.asked[2:] == [(1, False), (1, True)]
    assert evicted == [b"1"], "an urgent chunk has room enough"


def test_nothing_is_asked_for_what_can_never_be_enough() -> None:
    growth = Grants(plenty=0, most=9)
    pool, _ = make_pool(10, growth)
    assert pool.allocate(10) is None
    assert growth.asked == [(2, False)]
    assert pool.allocate(9) is not None


def test_a_refused_allocation_gives_out_nothing_and_keeps_what_was_granted() -> None:
    growth = Grants(plenty=1, most=1)
    pool, _ = make_pool(16, growth)
    assert pool.allocate(9) is None
    pool.check()
    assert (pool.num_usable, pool.num_free) == (7, 7)


def test_the_last_chunk_may_be_smaller() -> None:
    growth = Grants(plenty=9, most=9)
    pool, _ = make_pool(10, growth)
    assert ids(take(pool, 9)) == list(range(1, 10))
    assert growth.asked == [(2, False)]
    assert pool.allocate(1) is None
    assert growth.asked == [(2, False)]


def test_blocks_come_from_the_lowest_chunk_so_that_high_ones_empty() -> None:
    pool, _ = make_pool(12, Grants(plenty=2, most=2))
    blocks = take(pool, 11)
    for block in (blocks[9], blocks[2], blocks[5]):
        pool.release(block)
    assert ids(take(pool, 3)) == [3, 6, 10]


def test_chunks_without_content_go_first_and_the_highest_of_them() -> None:
    pool, evicted = make_pool(16, Grants(plenty=3, most=3))
    blocks = take(pool, 15)
    keep(pool, [blocks[4]])
    for block in blocks[3:]:
        if block.block_id != 5:
            pool.release(block)
    assert pool.num_reclaimable_chunks == 3
    assert pool.shrink(2) == [3, 2]
    assert evicted == []
    assert pool.shrink(9) == [1]
    assert evicted == [b"5"]
    pool.check()
    assert (pool.num_usable, pool.shrink(1)) == (3, [])


def test_of_chunks_with_content_the_one_not_used_for_longest_goes_first() -> None:
    pool, evicted = make_pool(16, Grants(plenty=3, most=3))
    blocks = take(pool, 15)
    by_chunk = {chunk: [b for b in blocks if b.block_id // 4 == chunk] for chunk in (1, 2, 3)}
    for chunk in (2, 1, 3):
        keep(pool, by_chunk[chunk])
    # A hit makes chunk 2 the newest.
    pool.acquire(by_chunk[2][1])
    pool.release(by_chunk[2][1])
    assert pool.shrink(1) == [1]
    assert sorted(evicted) == [b"4", b"5", b"6", b"7"]
    assert pool.shrink(1) == [3]
    pool.check()


def test_a_chunk_with_one_held_block_stays() -> None:
    pool, _ = make_pool(8, Grants(plenty=1, most=1))
    blocks = take(pool, 7)
    for block in blocks[:-1]:
        pool.release(block)
    assert (pool.num_reclaimable_chunks, pool.shrink(1)) == (0, [])
    pool.release(blocks[-1])
    assert pool.shrink(1) == [1]


def test_a_chunk_that_comes_back_is_empty_and_given_out_again() -> None:
    growth = Grants(plenty=1, most=1)
    pool, _ = make_pool(8, growth)
    keep(pool, take(pool, 7))
    assert pool.shrink(1) == [1]
    growth.plenty = growth.most = 1
    assert ids(take(pool, 2)) == [4, 5]
    assert all(block.block_hash is None for block in pool.committed() if block.block_id >= 4)


class GrowingPoolMachine(RuleBasedStateMachine):
    """Against a plain model: which ids are there, how often each is held, which have content."""

    held: Bundle[int] = Bundle("held")

    @initialize(num_blocks=st.integers(2, 21), chunk_blocks=st.integers(2, 5), floor=st.integers(1, 3))
    def start(self, num_blocks: int, chunk_blocks: int, floor: int) -> None:
        self.growth = Grants(chunk_blocks=chunk_blocks, floor_chunks=floor)
        self.pool, self.evicted = make_pool(num_blocks, self.growth)
        self.num_blocks = num_blocks
        self.floor = min(floor, -(-num_blocks // chunk_blocks))
        self.counts: dict[int, int] = dict.fromkeys(range(1, min(num_blocks, self.floor * chunk_blocks)), 0)
        self.content: list[int] = []
        """Free ids with content, least recently used first."""

    def grown(self) -> None:
        """Takes over what was granted: the lowest chunks that were not there."""
        for block in self.pool.committed():
            self.counts.setdefault(block.block_id, 0)

    @rule(plenty=st.integers(0, 3), extra=st.integers(0, 3))
    def memory_changes(self, plenty: int, extra: int) -> None:
        self.growth.plenty, self.growth.most = plenty, plenty + extra

    @rule(target=held, num_blocks=st.integers(1, 3))
    def allocate(self, num_blocks: int) -> int:
        self.evicted.clear()
        num_empty = sum(not count for count in self.counts.values()) - len(self.content)
        was_there = set(self.counts)
        oldest = list(self.content)
        blocks = self.pool.allocate(num_blocks)
        self.grown()
        new = set(self.counts) - was_there
        if blocks is None:
            assert num_blocks > self.pool.num_free
            assert not self.evicted
            return 0
        got = ids(blocks)
        assert len(set(got)) == num_blocks
        assert set(got) <= set(self.counts), "a block without memory was handed out"
        assert all(self.counts[block_id] == 0 for block_id in got)
        assert all(block.block_hash is None for block in blocks)
        num_evicted = max(0, num_blocks - num_empty - len(new))
        assert [b"%d" % i for i in oldest[:num_evicted]] == self.evicted
        if self.evicted:
            assert not min(self.growth.plenty, self.growth.most) or len(self.counts) == self.num_blocks - 1
        self.content = self.content[num_evicted:]
        for block_id in got:
            self.counts[block_id] = 1
        for block_id in got[1:]:
            self.pool.release(self.pool.blocks[block_id])
            self.counts[block_id] = 0
        return got[0]

    @rule(target=held, block_id=held)
    def share(self, block_id: int) -> int:
        if not self.counts.get(block_id):
            return 0
        self.pool.acquire(self.pool.blocks[block_id])
        self.counts[block_id] += 1
        return block_id

    @rule(block_id=consumes(held), stored=st.booleans())
    def release(self, block_id: int, stored: bool) -> None:
        if not self.counts.get(block_id):
            return
        block = self.pool.blocks[block_id]
        if stored and block.block_hash is None:
            block.block_hash = b"%d" % block_id
        self.pool.release(block)
        self.counts[block_id] -= 1
        if not self.counts[block_id] and block.block_hash:
            self.content.append(block_id)

    @rule(index=st.integers(0, 20))
    def hit(self, index: int) -> None:
        if index < len(self.content):
            block_id = self.content.pop(index)
            self.pool.acquire(self.pool.blocks[block_id])
            self.pool.release(self.pool.blocks[block_id])
            self.content.append(block_id)

    @rule(num_chunks=st.integers(1, 3))
    def shrink(self, num_chunks: int) -> None:
        self.evicted.clear()
        size = self.growth.chunk_blocks
        there = {block_id // size for block_id in self.counts} | {0}
        idle = {c for c in there if c and not any(self.counts.get(i) for i in range(c * size, (c + 1) * size))}
        # A last chunk with fewer blocks cannot stand for one of the floor's, and goes first.
        last = (self.num_blocks - 1) // size
        small = {last} & there if self.num_blocks % size and last >= self.floor else set()
        num_reclaimable = max(0, min(len(idle), len(there) - self.floor - len(small - idle)))
        assert self.pool.num_reclaimable_chunks == num_reclaimable
        gone = self.pool.shrink(num_chunks)
        assert len(set(gone)) == len(gone) == min(num_chunks, num_reclaimable)
        assert small & idle <= set(gone) or not gone
        assert set(gone) <= idle
        lost = [i for i in self.content if i // size in gone]
        assert sorted(self.evicted) == sorted(b"%d" % i for i in lost)
        # Nobody who stays was used before the newest content of who went.
        newest = {c: max((self.content.index(i) for i in self.content if i // size == c), default=-1) for c in idle}
        for chunk in idle - set(gone):
            assert all(newest[chunk] >= newest[other] for other in set(gone) - small)
        self.content = [i for i in self.content if i // size not in gone]
        for block_id in [i for i in self.counts if i // size in gone]:
            del self.counts[block_id]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert {b.block_id: b.ref_count for b in self.pool.committed()} == self.counts
        free = self.pool.free_ids()
        assert sorted(free) == sorted(i for i, count in self.counts.items() if not count)
        assert free[len(free) - len(self.content) :] == self.content
        assert (self.pool.num_free, self.pool.num_free_cached) == (len(free), len(self.content))


TestGrowingPoolMachine = GrowingPoolMachine.TestCase


def test_the_floor_is_made_of_whole_chunks_and_never_of_a_smaller_last_one() -> None:
    pool, _ = make_pool(5, Grants(chunk_blocks=2, floor_chunks=2, plenty=1, most=1))
    blocks = {block.block_id: block for block in take(pool, 4)}
    assert sorted(blocks) == [1, 2, 3, 4]
    for block_id in (1, 2, 3):
        pool.release(blocks[block_id])
    assert (pool.num_reclaimable_chunks, pool.shrink(1)) == (0, []), "the last chunk is held, and holds one block only"
    pool.release(blocks[4])
    assert pool.shrink(1) == [2]
    assert pool.num_usable == 3
    pool.check()
