"""Numbers about one model's KV cache, for metrics: blocks, slots, and slots that hold nothing.

Made by the KV manager on demand; never part of a decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naru_worker.core.request import Sequence


@dataclass(frozen=True, slots=True)
class KVStats:
    """Blocks and slots of this instant. ``num_used_blocks + num_free_blocks == num_blocks`` between steps."""

    num_blocks: int
    """Usable blocks when all memory is given: the null block is not among them."""
    num_used_blocks: int
    num_free_blocks: int
    """Cached ones included, and those that memory is not given for now."""
    num_cached_blocks: int
    """Free, and still holding a prefix that can be hit."""
    num_used_slots: int
    num_wasted_slots: int
    """Slots of used blocks that hold no token; a shared block counts once."""
    num_committed_blocks: int = 0
    """Usable blocks that memory is given for now."""

    @property
    def waste_ratio(self) -> float:
        """Wasted slots per used slot, in [0, 1]."""
        return self.num_wasted_slots / self.num_used_slots if self.num_used_slots else 0.0

    @property
    def usage_ratio(self) -> float:
        """Used blocks per block that there may ever be, in [0, 1]."""
        return self.num_used_blocks / self.num_blocks


def count_wasted_slots(sequences: Iterable[Sequence], block_size: int) -> int:
    """Slots without a token in the blocks of these sequences; O(blocks). A shared block counts once."""
    fill: dict[int, int] = {}
    for sequence in sequences:
        computed = sequence.num_computed_tokens
        for index, block_id in enumerate(sequence.block_table):
            # A fork may use one token less of a block than its elder: the fullest holder counts.
            fill[block_id] = max(fill.get(block_id, 0), min(block_size, computed - index * block_size))
    return sum(block_size - filled for filled in fill.values())
