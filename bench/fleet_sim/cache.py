"""A worker's paged prefix cache: blocks that running requests hold, and free ones that still hold a prefix, by age.

Called by the engine. It notes which route keys enter and leave, as a worker tells its routers.

Source: the block pool of vLLM: blocks of an ended request are freed from its end, so that beginnings stay longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.fleet_sim.prompts import RouteKey


@dataclass(slots=True)
class KeyLog:
    """Mutable: what entered and left, in the order of time."""

    times_s: list[float] = field(default_factory=list)
    changes: list[tuple[bool, int]] = field(default_factory=list)
    """(entered, block)."""


class PrefixCache:
    """Mutable."""

    def __init__(self, num_blocks: int, key_of_block: Mapping[int, RouteKey]) -> None:
        self.num_blocks = num_blocks
        self.num_private = 0
        """Held blocks that are not in the cache: being computed, or partly filled."""
        self.num_evicted = 0
        self.blocks = KeyLog()
        """Every cached block: what engines with KV events tell."""
        self.keys = KeyLog()
        """Only those that complete a route key which a request has brought here."""
        self.key_of_block = key_of_block
        self._holders: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._told: set[int] = set()

    def __contains__(self, block: int) -> bool:
        return block in self._holders or block in self._free

    @property
    def num_held(self) -> int:
        """Blocks that running requests need."""
        return len(self._holders) + self.num_private

    @property
    def usage(self) -> float:
        """Share of all blocks that running requests need."""
        return self.num_held / self.num_blocks

    def match(self, blocks: Sequence[int], max_blocks: int) -> int:
        """Leading blocks that are cached, at most `max_blocks`."""
        holders, free = self._holders, self._free
        for index in range(min(len(blocks), max_blocks)):
            if blocks[index] not in holders and blocks[index] not in free:
                return index
        return min(len(blocks), max_blocks)

    def has_room(self, blocks: Sequence[int], num_known: int, num_total: int) -> bool:
        """A request that needs so many blocks, the first of which are known, can begin."""
        num_new = num_total - num_known + sum(block in self._free for block in blocks[:num_known])
        return self.num_held + num_new <= self.num_blocks

    def acquire(self, blocks: Sequence[int], num_known: int, num_total: int, now_s: float) -> None:
        """Holds known blocks and takes new ones, from the longest unused prefixes where none is empty."""
        for block in blocks[:num_known]:
            self._free.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
            self._tell(block, now_s)
        self.num_private += num_total - num_known
        self._evict(now_s)

    def store(self, blocks: Sequence[int], now_s: float, *, is_prompt: bool) -> list[int]:
        """Blocks of a running request are computed; returns those that became cached through it.

        A block that another request has stored meanwhile stays private to this one until it ends. What is no prompt has
        no keys yet: the next prompt that says it again brings them.
        """
        stored = [block for block in blocks if block not in self._holders and block not in self._free]
        self.num_private -= len(stored)
        for block in stored:
            self._holders[block] = 1
            self.blocks.times_s.append(now_s)
            self.blocks.changes.append((True, block))
            if is_prompt:
                self._tell(block, now_s)
        return stored

    def release(self, held: Sequence[int], num_private: int) -> None:
        """A request has ended: its blocks are free, the last ones first."""
        self.num_private -= num_private
        for block in reversed(held):
            count = self._holders[block] - 1
            if count:
                self._holders[block] = count
            else:
                del self._holders[block]
                self._free[block] = None

    def _tell(self, block: int, now_s: float) -> None:
        if block in self.key_of_block and block not in self._told:
            self._told.add(block)
            self.keys.times_s.append(now_s)
            self.keys.changes.append((True, block))

    def _evict(self, now_s: float) -> None:
        while len(self._holders) + self.num_private + len(self._free) > self.num_blocks:
            block, _ = self._free.popitem(last=False)
            self.num_evicted += 1
            self.blocks.times_s.append(now_s)
            self.blocks.changes.append((False, block))
            if block in self._told:
                self._told.remove(block)
                self.keys.times_s.append(now_s)
                self.keys.changes.append((False, block))
