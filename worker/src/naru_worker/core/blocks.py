"""A pool of KV-cache blocks: who holds which, and which one is given out next.

Called by the KV manager only. Knows nothing of tokens or tensors: a block is a number with a reference count and, when
its content can be found again, a hash. A free block keeps its hash, and so its content, until it is given out.

The pool may grow and shrink by chunks of consecutive blocks. Blocks are given out in this order: free ones without
content, of the lowest chunk that has any, so that the higher chunks empty; then new ones, while memory is plenty; then
those with content, least recently used first; then new ones that others must make room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from naru_worker.core.block_list import Block, FreeList
from naru_worker.core.kv_growth import KVGrowth

__all__ = ["NULL_BLOCK", "Block", "BlockPool", "FreeList"]

NULL_BLOCK = 0
"""Never handed out: padding of block tables points here."""


class Chunk:
    """Consecutive blocks that come and go together."""

    __slots__ = ("blocks", "fresh", "index", "is_committed", "is_queued", "last_use", "num_held")

    def __init__(self, index: int) -> None:
        self.index = index
        self.blocks: list[Block] = []
        """Made when they first come, and kept: what is linked both ways would be left to the garbage collector."""
        self.is_committed = False
        self.is_queued = False
        """It stands in the queue of chunks with fresh blocks."""
        self.fresh = FreeList()
        """Its free blocks without content."""
        self.num_held = 0
        self.last_use = 0
        """Grows with every release of a block with content."""


class BlockPool:
    """All blocks of one model. Every committed block but the null block is either free or held (``ref_count > 0``).

    `evict` is called with a block that still has its hash, right before it is given out for new content, or given up;
    it must forget the hash. Without `growth` all `num_blocks` are there from the beginning, and stay.
    """

    def __init__(self, num_blocks: int, evict: Callable[[Block], None], growth: KVGrowth | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks!r}; at least 2 are needed, the first is the null block")
        self._absent = Block(-1)
        self.blocks = [self._absent] * num_blocks
        """By id; blocks that are not committed are all the same one, which is nobody's."""
        self.num_usable = -1
        """Blocks that can be held now: committed ones, but for the null block."""
        self.num_committed_chunks = 0
        self._num_idle_chunks = 0
        self._num_fresh = 0
        self._evict = evict
        self._growth = growth
        self._chunk_blocks = num_blocks if growth is None else growth.chunk_blocks
        self._chunks = [Chunk(index) for index in range(-(-num_blocks // self._chunk_blocks))]
        self._open_chunks: list[int] = []
        self._cached = FreeList()
        self._num_uses = 0
        self._floor_chunks = len(self._chunks) if growth is None else min(growth.floor_chunks, len(self._chunks))
        if self._floor_chunks * self._chunk_blocks < 2:
            raise ValueError(
                f"a pool that starts with {self._floor_chunks!r} chunks of {self._chunk_blocks!r} blocks has no block "
                "to give; raise the floor"
            )
        for chunk in self._chunks[: self._floor_chunks]:
            self._commit(chunk)

    @property
    def max_usable(self) -> int:
        """Blocks that can be held when all memory is there."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out without more memory, cached ones included."""
        return self._num_fresh + len(self._cached)

    @property
    def num_free_cached(self) -> int:
        """Free blocks whose content can still be found by hash."""
        return len(self._cached)

    @property
    def num_reclaimable_chunks(self) -> int:
        """Chunks that `shrink` could give up now."""
        # A last chunk with fewer blocks cannot stand for one of the floor's: while it is held, one chunk more stays.
        num_kept = self._floor_chunks + (self._has_small_last and self._chunks[-1].num_held > 0)
        return max(0, min(self._num_idle_chunks, self.num_committed_chunks - num_kept))

    def make_room(self, num_blocks: int, num_others: int = 0) -> bool:
        """Whether so many blocks can be given out while `num_others` more stay free; grows for it where it may.

        What was granted stays, even where it was not enough.
        """
        num_needed = num_blocks + num_others
        if self._growth is not None and self.num_committed_chunks < len(self._chunks):
            self._grow(max(num_blocks - self._num_fresh, num_needed - self.num_free), is_urgent=False)
            self._grow(num_needed - self.num_free, is_urgent=True)
        return num_needed <= self.num_free

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Gives out blocks with one reference each: all of them, or None and none was given out."""
        if not self.make_room(num_blocks):
            return None
        return [self._take() for _ in range(num_blocks)]

    def acquire(self, block: Block) -> None:
        """Adds a reference; a free block comes back to life with its content."""
        if block.ref_count == 0:
            chunk = self._chunk_of(block)
            if block.block_hash is None:
                chunk.fresh.remove(block)
                self._num_fresh -= 1
            else:
                self._cached.remove(block)
            self._hold(chunk)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drops a reference; the last one makes the block free.

        Content that can be found again is given out last of its kind, the rest first.
        """
        assert block.ref_count > 0, "a block was released more often than acquired"
        block.ref_count -= 1
        if block.ref_count:
            return
        chunk = self._chunk_of(block)
        chunk.num_held -= 1
        if chunk.num_held == 0:
            self._num_idle_chunks += 1
        if block.block_hash is None:
            chunk.fresh.append_left(block)
            self._offer(chunk)
            self._num_fresh += 1
        else:
            self._cached.append(block)
            self._num_uses += 1
            chunk.last_use = self._num_uses

    def shrink(self, num_chunks: int) -> list[int]:
        """Gives up so many chunks, or as many as nobody holds a block of, down to the floor; returns their indices.

        A last chunk with fewer blocks first, so that the floor is made of whole ones; then chunks without content, the
        highest of them; then those whose newest content was not used for longest.
        """
        num_chunks = min(num_chunks, self.num_reclaimable_chunks)
        if num_chunks <= 0:
            return []
        idle = [chunk for chunk in self._chunks if chunk.is_committed and chunk.num_held == 0]
        small = self._chunks[-1] if self._has_small_last else None
        idle.sort(key=lambda each: (each is not small, each.last_use if self._has_content(each) else 0, -each.index))
        for chunk in idle[:num_chunks]:
            self._give_up(chunk)
        return [chunk.index for chunk in idle[:num_chunks]]

    @property
    def _has_small_last(self) -> bool:
        """Whether a last chunk with fewer blocks is there, above the floor."""
        is_small = len(self.blocks) % self._chunk_blocks != 0 and len(self._chunks) > self._floor_chunks
        return is_small and self._chunks[-1].is_committed

    def forget_hashes(self) -> None:
        """Clears the hash of every block; what is held stays held."""
        while self._cached:
            block = self._cached.pop_left()
            chunk = self._chunk_of(block)
            chunk.fresh.append(block)
            self._offer(chunk)
            self._num_fresh += 1
        for block in self.blocks:
            block.block_hash = None

    def committed(self) -> Iterator[Block]:
        """All blocks there are, but for the null block (for tests and debugging: O(n))."""
        return (block for block in self.blocks[1:] if block is not self._absent)

    def free_ids(self) -> list[int]:
        """Ids of free blocks, the next to be given out first (for tests and debugging: O(n))."""
        return [block_id for chunk in self._chunks for block_id in chunk.fresh.ids()] + self._cached.ids()

    def check(self) -> None:
        """Asserts that chunks and counts agree (for tests: O(n))."""
        committed = [chunk for chunk in self._chunks if chunk.is_committed]
        assert self.num_committed_chunks == len(committed) >= self._floor_chunks
        assert self.num_usable == sum(1 for _ in self.committed())
        assert self._num_fresh == sum(len(chunk.fresh) for chunk in committed)
        assert self._num_idle_chunks == sum(chunk.num_held == 0 for chunk in committed)
        for chunk in self._chunks:
            there = [self.blocks[block.block_id] is block for block in chunk.blocks]
            assert all(there) if chunk.is_committed else not any(there), "blocks come and go with their chunk"
            assert chunk.num_held == sum(block.ref_count > 0 for block in chunk.blocks)
            assert not chunk.fresh or (chunk.is_committed and chunk.is_queued), "fresh blocks that nobody can get"

    # --- parts ----------------------------------------------------------------------------------------------------

    def _chunk_of(self, block: Block) -> Chunk:
        return self._chunks[block.block_id // self._chunk_blocks]

    def _has_content(self, chunk: Chunk) -> bool:
        """Of a chunk that nobody holds a block of."""
        return len(chunk.fresh) < len(chunk.blocks)

    def _take(self) -> Block:
        open_chunks = self._open_chunks
        while open_chunks and not self._chunks[open_chunks[0]].fresh:
            self._chunks[heappop(open_chunks)].is_queued = False
        if open_chunks:
            chunk = self._chunks[open_chunks[0]]
            block = chunk.fresh.pop_left()
            self._num_fresh -= 1
        else:
            block = self._cached.pop_left()
            chunk = self._chunk_of(block)
            self._evict(block)
        block.ref_count = 1
        self._hold(chunk)
        return block

    def _hold(self, chunk: Chunk) -> None:
        if chunk.num_held == 0:
            self._num_idle_chunks -= 1
        chunk.num_held += 1

    def _offer(self, chunk: Chunk) -> None:
        if not chunk.is_queued:
            chunk.is_queued = True
            heappush(self._open_chunks, chunk.index)

    def _grow(self, num_missing: int, *, is_urgent: bool) -> None:
        assert self._growth is not None, "a fixed pool does not grow"
        num_absent = self.max_usable - self.num_usable
        # Others are not asked to make room for what would not be enough with all there can be.
        if num_missing <= 0 or (is_urgent and num_missing > num_absent):
            return
        num_chunks = min(-(-num_missing // self._chunk_blocks), len(self._chunks) - self.num_committed_chunks)
        num_granted = self._growth.grow(num_chunks, is_urgent=is_urgent) if num_chunks else 0
        assert 0 <= num_granted <= num_chunks, "as much is granted as was asked for, or less"
        if num_granted:
            absent = [chunk for chunk in self._chunks if not chunk.is_committed]
            for chunk in absent[:num_granted]:
                self._commit(chunk)

    def _commit(self, chunk: Chunk) -> None:
        first = chunk.index * self._chunk_blocks
        last = min(first + self._chunk_blocks, len(self.blocks))
        if not chunk.blocks:
            chunk.blocks = [Block(block_id) for block_id in range(first, last)]
        self.blocks[first:last] = chunk.blocks
        for block in chunk.blocks:
            if block.block_id == NULL_BLOCK:
                block.ref_count = chunk.num_held = 1
            else:
                chunk.fresh.append(block)
        chunk.is_committed = True
        self._offer(chunk)
        self._num_fresh += len(chunk.fresh)
        self._num_idle_chunks += chunk.num_held == 0
        self.num_committed_chunks += 1
        self.num_usable += last - first

    def _give_up(self, chunk: Chunk) -> None:
        for block in chunk.blocks:
            if block.block_hash is not None:
                self._cached.remove(block)
                self._evict(block)
            else:
                chunk.fresh.remove(block)
                self._num_fresh -= 1
            self.blocks[block.block_id] = self._absent
        self._num_idle_chunks -= 1
        self.num_committed_chunks -= 1
        self.num_usable -= len(chunk.blocks)
        chunk.is_committed = False
        chunk.last_use = 0
