"""One KV-cache block, and a list of free ones.

Used by the block pool, and by the prefix cache, which keeps blocks by their content.
"""

from __future__ import annotations


class Block:
    """One block. ``ref_count == 0`` exactly while it is in a free list."""

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
