"""Which blocks of a KV cache have memory behind them: asked before each step, told when blocks are given up.

Block numbers come from the block pool, low ones first; here pages do not come by being touched, as on a CPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.cuda.memory.device_arena import DeviceArena
from naru_worker.adapters.ops.protocol import BatchInputs


class KVBlocks:
    """Blocks of `block_bytes` each, one behind the other in an arena. Called in the engine thread.

    Block 0, the null block, always has memory: kernels read it where a table has no block. It is not in the floor of
    blocks that a step may use, but in the same chunks.
    """

    def __init__(self, arena: DeviceArena, num_blocks: int, block_bytes: int) -> None:
        """Makes room for the null block.

        Raises:
            ValueError: the arena is too small.
            OutOfDeviceMemory: there is no room for the null block.
        """
        if num_blocks * block_bytes > arena.reserved_bytes:
            raise ValueError(
                f"{num_blocks} blocks of {block_bytes} bytes do not fit the {arena.reserved_bytes} bytes of the arena"
            )
        self.arena = arena
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._is_there: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.ensure(np.zeros(1, np.int32))

    def ensure_for(self, batch: BatchInputs, block_size: int) -> None:
        """Puts memory behind all blocks that a step writes to: those of its slots, and destinations of its copies.

        Raises:
            OutOfDeviceMemory: there is no room for all of them; the step must not run.
        """
        self.ensure(batch.slots // block_size)
        if len(batch.copies):
            self.ensure(batch.copies[:, 1])

    def ensure(self, blocks: npt.NDArray[np.integer]) -> None:
        """Puts memory behind blocks, in any order; negative numbers are ignored. New blocks come one run at a time.

        Raises:
            OutOfDeviceMemory: there is no room for all of them; some may have come.
        """
        # Of -1 (nowhere) the flag of the last block is looked at: at worst a look too many.
        is_there = self._is_there[blocks]
        if is_there.all():
            return
        missing = np.unique(blocks[~is_there & (blocks >= 0)])
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else ():
            first, count = int(run[0]), len(run)
            self.arena.ensure(first * self.block_bytes, count * self.block_bytes)
            self._is_there[first : first + count] = True

    def release(self, first_block: int, num_blocks: int) -> int:
        """Gives up blocks that no step uses, but never the null block; returns the bytes that went to the pool.

        Raises:
            ValueError: the blocks lie outside the cache.
            DeviceError: the device refused.
        """
        if not 0 <= first_block <= first_block + num_blocks <= self.num_blocks:
            raise ValueError(
                f"blocks [{first_block}, {first_block + num_blocks}) lie outside the {self.num_blocks} of the cache"
            )
        first, stop = max(1, first_block), first_block + num_blocks
        if first >= stop:
            return 0
        self._is_there[first:stop] = False
        return self.arena.release(first * self.block_bytes, (stop - first) * self.block_bytes)
