"""The block pool: who holds what, and in which order blocks are given out."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from naru_worker.core.blocks import NULL_BLOCK, Block, BlockPool


def make_pool(num_blocks: int) -> tuple[BlockPool, list[bytes]]:
    evicted: list[bytes] = []

    def evict(block: Block) -> None:
        assert block.block_hash is not None
        evicted.append(block.block_hash)
        block.block_hash = None

    return BlockPool(num_blocks, evict), evicted


def take(pool: BlockPool, num_blocks: int) -> list[Block]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def test_null_block_is_never_handed_out() -> None:
    pool, _ = make_pool(5)
    assert sorted(block.block_id for block in take(pool, 4)) == [1, 2, 3, 4]
    assert NULL_BLOCK not in pool.free_ids()


def test_a_pool_of_only_the_null_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1"):
        make_pool(1)


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool, evicted = make_pool(5)
    for block in take(pool, 4):
        block.block_hash = b"%d" % block.block_id
        pool.release(block)
    before = pool.free_ids()
    assert pool.allocate(5) is None
    assert pool.free_ids() == before
    assert evicted == []
    assert pool.num_free_cached == 4


def test_freed_blocks_with_content_are_given_out_last_and_oldest_first() -> None:
    pool, evicted = make_pool(6)
    first, second, third = take(pool, 3)
    for block, block_hash in ((second, b"2"), (first, b"1")):
        block.block_hash = block_hash
        pool.release(block)
    pool.release(third)
    assert pool.free_ids() == [third.block_id, 4, 5, second.block_id, first.block_id]
    take(pool, 4)
    assert evicted == [b"2"]
    assert pool.num_free_cached == 1


def test_a_freed_block_keeps_its_content_until_it_is_given_out() -> None:
    pool, evicted = make_pool(4)
    (block,) = take(pool, 1)
    block.block_hash = b"x"
    pool.release(block)
    pool.acquire(block)
    assert (block.ref_count, block.block_hash, evicted) == (1, b"x", [])
    assert block.block_id not in pool.free_ids()
    assert pool.num_free_cached == 0


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool, _ = make_pool(3)
    (block,) = take(pool, 1)
    pool.acquire(block)
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


def test_releasing_too_often_is_noticed() -> None:
    pool, _ = make_pool(3)
    (block,) = take(pool, 1)
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


class PoolMachine(RuleBasedStateMachine):
    """Against a plain model: counts in a dict, free ids in a list."""

    held: Bundle[int] = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool, _ = make_pool(8)
        self.counts = dict.fromkeys(range(1, 8), 0)
        self.order = list(range(1, 8))

    @rule(target=held)
    def allocate(self) -> int:
        blocks = self.pool.allocate(1)
        if not self.order:
            assert blocks is None
            return 0
        assert blocks is not None
        block_id = self.order.pop(0)
        assert blocks[0].block_id == block_id
        assert blocks[0].block_hash is None
        self.counts[block_id] = 1
        return block_id

    @rule(num_blocks=st.integers(2, 8))
    def allocate_too_many(self, num_blocks: int) -> None:
        if num_blocks > len(self.order):
            assert self.pool.allocate(num_blocks) is None

    @rule(target=held, block_id=held)
    def share(self, block_id: int) -> int:
        if not block_id or not self.counts[block_id]:
            return 0
        self.pool.acquire(self.pool.blocks[block_id])
        self.counts[block_id] += 1
        return block_id

    @rule(block_id=consumes(held), stored=st.booleans())
    def release(self, block_id: int, stored: bool) -> None:
        if not block_id or not self.counts[block_id]:
            return
        block = self.pool.blocks[block_id]
        if stored and block.block_hash is None:
            block.block_hash = b"content"
        self.pool.release(block)
        self.counts[block_id] -= 1
        if not self.counts[block_id]:
            self.order.insert(len(self.order) if block.block_hash else 0, block_id)

    @rule(block_id=st.integers(1, 7))
    def hit(self, block_id: int) -> None:
        block = self.pool.blocks[block_id]
        if block.block_hash is not None and not self.counts[block_id]:
            self.pool.acquire(block)
            self.order.remove(block_id)
            self.pool.release(block)
            self.order.append(block_id)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.pool.free_ids() == self.order
        assert self.pool.num_free == len(self.order)
        assert {block.block_id: block.ref_count for block in self.pool.blocks[1:]} == self.counts
        cached = sum(self.pool.blocks[block_id].block_hash is not None for block_id in self.order)
        assert self.pool.num_free_cached == cached


TestPoolMachine = PoolMachine.TestCase
