"""The memory of one model's KV cache: joins the growth of its blocks to the ledger and to the runner's arena.

Made by the loader; used by the model's engine and, through `KVReclaimer`, by the engines of other models that need
room. Everything but `make_kv_space` is called in the engine thread.

The floor is booked by whoever loads the model, before it is loaded, and unbooked by whoever unloads it, with all the
rest (`MemoryLedger.unbook_kv(model)`); here only what lies above the floor comes and goes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from naru_proto.errors import NaruError
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.ops.protocol import Runner
from naru_worker.core.kv_growth import KVLayout, kv_layout
from naru_worker.core.kv_manager import KVManager

_log = logging.getLogger(__name__)


def make_kv_space(
    model: str, ledger: MemoryLedger, runner: Runner, kv_block_bytes: int, num_blocks: int, floor_blocks: int
) -> KVSpace:
    """The growth port of a model's KV manager: ``KVManager(num_blocks, ..., growth=space)``.

    `num_blocks` (null block included) is the most it may ever have. ``kv_layout`` of the same numbers says beforehand
    what the floor takes.
    """
    return KVSpace(model, ledger, runner, kv_layout(kv_block_bytes, num_blocks, floor_blocks))


class KVSpace:
    """One model's KV bytes. Grows as `KVGrowth`; shrinks by giving up chunks that no sequence holds."""

    def __init__(self, model: str, ledger: MemoryLedger, runner: Runner, layout: KVLayout) -> None:
        self.model = model
        self.layout = layout
        self.num_grows = 0
        """Times it was granted memory."""
        self.num_shrinks = 0
        """Times it gave memory back."""
        self.is_busy = False
        """Its engine has requests."""
        self.is_frozen = False
        """A step may still write into blocks that nobody holds any more: nothing can be given up."""
        self.last_used_s = 0.0
        """When its engine last had work."""
        self.reclaimer: KVReclaimer | None = None
        """Who is asked when the ledger has no room; set while the engine takes part in the loop."""
        self._ledger = ledger
        self._runner = runner
        self._is_closed = False
        self._has_last = layout.floor_chunks == layout.num_chunks
        """The last chunk, which may be smaller than the others, is there."""
        self._kv: KVManager | None = None
        self._on_change: Callable[[], None] = lambda: None

    def attach(self, kv: KVManager, on_change: Callable[[], None]) -> None:
        """Names the blocks behind it, and who is told when their number has changed.

        Raises:
            ValueError: the KV manager was not made with this space as its growth.
        """
        if kv.growth is not self:
            raise ValueError(f"the KV manager of model {self.model!r} grows elsewhere; make it with growth=kv_space")
        self._kv, self._on_change = kv, on_change

    def close(self) -> None:
        """The engine has left the loop: its runner and its bookings are somebody else's to end."""
        self._is_closed = True

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one chunk."""
        return self.layout.chunk_blocks

    @property
    def floor_chunks(self) -> int:
        """Chunks it never gives up."""
        return self.layout.floor_chunks

    @property
    def committed_bytes(self) -> int:
        """Bytes of all chunks it has now."""
        return self.layout.bytes_of(self._num_chunks, with_last=self._has_last)

    @property
    def reclaimable_bytes(self) -> int:
        """What `trim` could give back now, at least."""
        if self._kv is None or self.is_frozen or self._is_closed:
            return 0
        num_chunks = self._kv.num_reclaimable_chunks
        return self.layout.bytes_of(num_chunks, with_last=self._has_last) if num_chunks else 0

    @property
    def memory_version(self) -> int:
        """Changes whenever bytes are booked or given back by anybody."""
        return self._ledger.version

    def grow(self, num_chunks: int, *, is_urgent: bool) -> int:
        """Books chunks: as many as there is room for below the soft limit; urgent ones all or none.

        Urgent chunks may be made from cached prefixes of other models. Half of what is needed would cost these their
        prefixes and help nobody.
        """
        num_absent = self.layout.num_chunks - self._num_chunks
        num_granted = 0
        if is_urgent:
            num_granted = num_chunks if self._book_urgent(self._growth_bytes(num_chunks, num_absent)) else 0
        else:
            while num_granted < num_chunks and self._ledger.book_kv(
                self.model, self._growth_bytes(1, num_absent - num_granted), is_urgent=False
            ):
                num_granted += 1
        self._has_last = self._has_last or num_granted == num_absent
        self.num_grows += num_granted > 0
        return num_granted

    def trim(self, num_bytes: int) -> int:
        """Gives up chunks that no sequence holds until so many bytes have come back; returns how many did.

        Cached prefixes in them are forgotten, those not used for longest first.
        """
        if self._kv is None or self.is_frozen or self._is_closed or num_bytes <= 0:
            return 0
        num_freed = 0
        try:
            while num_freed < num_bytes:
                chunks = self._kv.shrink(-(-(num_bytes - num_freed) // self.layout.chunk_bytes))
                if not chunks:
                    break
                self.num_shrinks += 1
                for first, count in _runs(sorted(chunks)):
                    num_freed += self._give_back(self._kv, first, count)
        except (NaruError, OSError):
            _log.exception("KV memory of model %s could not be given back; it stays booked", self.model)
        self._on_change()
        return num_freed

    @property
    def _num_chunks(self) -> int:
        return self.floor_chunks if self._kv is None else self._kv.num_committed_chunks

    def _growth_bytes(self, num_chunks: int, num_absent: int) -> int:
        """Of the lowest chunks among those that are absent: all of them include the last, which may be smaller."""
        return self.layout.bytes_of(num_chunks, with_last=not self._has_last and num_chunks == num_absent)

    def _give_back(self, kv: KVManager, first_chunk: int, num_chunks: int) -> int:
        is_last = first_chunk + num_chunks == self.layout.num_chunks
        self._has_last = self._has_last and not is_last
        first_block = first_chunk * self.chunk_blocks
        num_blocks = min(num_chunks * self.chunk_blocks, kv.num_blocks - first_block)
        # Bytes are free once the machine has them back, not before.
        self._runner.release_blocks(first_block, num_blocks)
        return self._ledger.unbook_kv(self.model, self.layout.bytes_of(num_chunks, with_last=is_last))

    def _book_urgent(self, num_bytes: int) -> bool:
        if self._ledger.book_kv(self.model, num_bytes):
            return True
        num_missing = num_bytes - self._ledger.free_bytes()
        if self.reclaimer is None or not self.reclaimer.reclaim(num_missing, self):
            return False
        # Somebody else may have been faster; then it is as if there had been nothing.
        return self._ledger.book_kv(self.model, num_bytes)


class KVReclaimer:
    """All KV spaces of one engine loop. Gives one what others only keep in case it is asked for again."""

    def __init__(self) -> None:
        self._spaces: list[KVSpace] = []

    def add(self, space: KVSpace) -> None:
        """From now on it may be asked to give, and may ask."""
        self._spaces.append(space)
        space.reclaimer = self

    def remove(self, space: KVSpace) -> None:
        """It is left alone from now on, for good."""
        if space in self._spaces:
            self._spaces.remove(space)
            space.reclaimer = None
            space.close()

    def reclaim(self, num_bytes: int, asker: KVSpace) -> bool:
        """Makes others give up cached prefixes: all that is needed, or, where that cannot be had, nothing.

        Models without requests first, among them those that were not used for longest.
        """
        others = [space for space in self._spaces if space is not asker and space.reclaimable_bytes > 0]
        if sum(space.reclaimable_bytes for space in others) < num_bytes:
            return False
        others.sort(key=lambda space: (space.is_busy, space.last_used_s))
        for space in others:
            if num_bytes <= 0:
                break
            num_bytes -= space.trim(num_bytes)
        return num_bytes <= 0


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers in an ascending list."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs
