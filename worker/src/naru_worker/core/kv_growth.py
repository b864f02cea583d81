"""How one model's KV cache grows: chunks of blocks, the floor it starts with, and the port that asks for more memory.

The sizes are known before a model is loaded; the port is called by the block pool and answered outside, where the bytes
of all models are booked. Nothing here books or allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

PAGE_BYTES = 4096
MIN_CHUNK_BYTES = 2 << 20
MAX_CHUNK_BYTES = 4 << 20
FLOOR_TOKENS = 512
"""A model that has just been loaded can serve one sequence of this length without asking for memory."""


class KVGrowth(Protocol):
    """Where a block pool gets chunks from. Called in the engine thread, while a step is planned."""

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one chunk: consecutive ids, chunk c begins with block ``c * chunk_blocks``."""

    @property
    def floor_chunks(self) -> int:
        """Chunks the pool starts with, at least one; they hold two blocks or more, and are never given up."""

    def grow(self, num_chunks: int, *, is_urgent: bool) -> int:
        """Grants up to so many chunks, the lowest that are not there. Urgent: also at the cost of others' caches."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of one model's KV cache."""

    chunk_blocks: int
    chunk_bytes: int
    num_chunks: int
    """The most there will ever be."""
    floor_chunks: int
    last_chunk_bytes: int
    """The last chunk may have fewer blocks."""

    @property
    def floor_bytes(self) -> int:
        """What is booked before the model is loaded."""
        return self.bytes_of(self.floor_chunks, with_last=self.floor_chunks == self.num_chunks)

    def bytes_of(self, num_chunks: int, *, with_last: bool) -> int:
        """Bytes of so many chunks, the last one among them or not."""
        return num_chunks * self.chunk_bytes - (self.chunk_bytes - self.last_chunk_bytes if with_last else 0)


def chunk_blocks(kv_block_bytes: int) -> int:
    """Blocks of a chunk: the fewest with 2 MiB or more in whole pages, at least one.

    Whole pages give way where they would take more than 4 MiB: what a chunk shares with its neighbours is then kept.
    """
    num_for_pages = PAGE_BYTES // math.gcd(kv_block_bytes, PAGE_BYTES)
    unit_bytes = num_for_pages * kv_block_bytes
    if unit_bytes > MAX_CHUNK_BYTES:
        return max(1, MIN_CHUNK_BYTES // kv_block_bytes)
    return num_for_pages * -(-MIN_CHUNK_BYTES // unit_bytes)


def kv_floor_blocks(max_model_len: int, block_size: int) -> int:
    """Blocks for one sequence of modest length, null block included."""
    return -(-min(FLOOR_TOKENS, max_model_len) // block_size) + 1


def kv_layout(kv_block_bytes: int, num_blocks: int, floor_blocks: int) -> KVLayout:
    """Chunks of a cache of at most `num_blocks` blocks (null block included) that starts with `floor_blocks` or more.

    Raises:
        ValueError: fewer than two blocks, or blocks without bytes.
    """
    if num_blocks < 2 or kv_block_bytes < 1:
        raise ValueError(f"num_blocks is {num_blocks!r} and kv_block_bytes {kv_block_bytes!r}; 2 and 1 are the least")
    # A small cache is one chunk, all of it floor.
    blocks = min(chunk_blocks(kv_block_bytes), num_blocks)
    num_chunks = -(-num_blocks // blocks)
    floor = min(num_chunks, -(-max(floor_blocks, 2) // blocks))
    last_blocks = num_blocks - (num_chunks - 1) * blocks
    return KVLayout(blocks, blocks * kv_block_bytes, num_chunks, floor, last_blocks * kv_block_bytes)
