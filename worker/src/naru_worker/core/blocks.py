"""A pool of KV-cache blocks: who holds which, and which one is given out next.

Called by the KV manager only. Knows nothing of tokens or tensors: a block is a number with a reference count and, when
its content can be found again, a hash. A free block keeps its hash, and so its content, until it is given out.
"""

from __future__ import annotations

from collections.abc import Callable

NULL_BLOCK = 0
"""Never handed out: padding of block tables points here."""


class Block:
    """One block. ``ref_count == 0`` exactly while it is in the free list."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev = self
        self.next = self


class FreeList:
    """Doubly linked list through the blocks themselves: append, pop and remove cost O(1) and no memory."""

    __slots__ = ("_head", "_length")

    def __init__(self) -> None:
        self._head = Block(-1)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, block: Block) -> None:
        """Puts a block at the end: it is given out last."""
        self._link(block, self._head.prev, self._head)

    def append_left(self, block: Block) -> None:
        """Puts a block at the front: it is given out next."""
        self._link(block, self._head, self._head.next)

    def pop_left(self) -> Block:
        """Takes the first block. The list must not be empty."""
        assert self._length > 0, "pop from an empty free list"
        block = self._head.next
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes out a block that is in the list."""
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = block
        self._length -= 1

    def ids(self) -> list[int]:
        """Block ids, the next to be given out first."""
        ids = []
        block = self._head.next
        while block is not self._head:
            ids.append(block.block_id)
            block = block.next
        return ids

    def _link(self, block: Block, left: Block, right: Block) -> None:
        block.prev, block.next = left, right
        left.next = right.prev = block
        self._length += 1


class BlockPool:
    """All blocks of one model. Every block but the null block is either free or held (``ref_count > 0``).

    `evict` is called with a block that still has its hash, right before it is given out for new content; it must
    forget the hash.
    """

    def __init__(self, num_blocks: int, evict: Callable[[Block], None]) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks!r}; at least 2 are needed, the first is the null block")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK].ref_count = 1
        self.num_usable = num_blocks - 1
        self.num_free_cached = 0
        """Free blocks whose content can still be found by hash."""
        self._evict = evict
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, cached ones included."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Gives out blocks with one reference each: all of them, or None and nothing changed."""
        if num_blocks > len(self._free):
            return None
        blocks = []
        for _ in range(num_blocks):
            block = self._free.pop_left()
            if block.block_hash is not None:
                self.num_free_cached -= 1
                self._evict(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def acquire(self, block: Block) -> None:
        """Adds a reference; a free block comes back to life with its content."""
        if block.ref_count == 0:
            self._free.remove(block)
            if block.block_hash is not None:
                self.num_free_cached -= 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drops a reference; the last one makes the block free.

        Content that can be found again goes to the end of the free list, the rest to the front.
        """
        assert block.ref_count > 0, "a block was released more often than acquired"
        block.ref_count -= 1
        if block.ref_count:
            return
        if block.block_hash is None:
            self._free.append_left(block)
        else:
            self._free.append(block)
            self.num_free_cached += 1

    def forget_hashes(self) -> None:
        """Clears the hash of every block; what is held stays held."""
        for block in self.blocks:
            block.block_hash = None
        self.num_free_cached = 0

    def free_ids(self) -> list[int]:
        """Ids of free blocks, the next to be given out first (for tests and debugging: O(n))."""
        return self._free.ids()
