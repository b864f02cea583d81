"""Block tables of one model's sequences: prefix hits, allocation, copy-on-write forks, and giving back.

Called by the scheduler. It decides which block holds which tokens and never touches a tensor: what must be copied
between blocks leaves as a list that the runner carries out before anything else.

Between steps a sequence's table has exactly ``ceil(num_computed_tokens / block_size)`` blocks, and every block the
prefix cache offers is full and computed. Nobody writes into a block that another sequence holds or that the cache
offers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naru_worker.core.blocks import Block, BlockPool
from naru_worker.core.kv_growth import KVGrowth
from naru_worker.core.kv_stats import KVStats, count_wasted_slots
from naru_worker.core.prefix_cache import BlockHasher, PrefixCache, root_hash, salted_hash, shared_root_hash
from naru_worker.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache has of a sequence's known tokens. Valid until the next allocation."""

    blocks: tuple[Block, ...] = ()
    num_tokens: int = 0
    """At most the known tokens less one: the last is computed again, or there would be no logits."""
    awaited_hash: bytes | None = None
    """The next block, where a running sequence is computing it right now: waiting for it saves the work."""


NO_MATCH = PrefixMatch()


class KVManager:
    """The KV cache of one model, as numbers. Mutates `block_table`, `block_hashes` and (fork, free) the computed count.

    `num_blocks` includes the null block; with `growth` it is the most there will ever be, and the pool starts with the
    floor. `model_revision` names the exact weights and goes into every hash.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model_revision: str,
        enable_prefix_caching: bool = True,
        growth: KVGrowth | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size!r}; it must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.growth = growth
        self.epoch = 0
        """Grows with every `reset`: hashes reported under an older one are void."""
        self.is_in_flight = False
        """A step is launched that may still use blocks which are given up now: nobody gets them before the next
        `forget_copies`."""
        self.cache = PrefixCache()
        self._pool = BlockPool(num_blocks, self.cache.remove, growth)
        self._hasher = BlockHasher(block_size)
        self._model_revision = model_revision
        self._is_caching = enable_prefix_caching
        self._computing: dict[bytes, Sequence] = {}
        self._copies: list[tuple[int, int]] = []
        self._copy_sources: set[int] = set()
        self._set_aside: list[Block] = []

    # --- questions -----------------------------------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold together in the memory there is now."""
        return self._pool.num_usable

    @property
    def max_usable_blocks(self) -> int:
        """Blocks that sequences can hold together when all memory is there."""
        return self._pool.max_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out without more memory."""
        return self._pool.num_free

    @property
    def num_committed_chunks(self) -> int:
        """Chunks there are now."""
        return self._pool.num_committed_chunks

    @property
    def num_reclaimable_chunks(self) -> int:
        """Chunks that `shrink` could give up now."""
        return self._pool.num_reclaimable_chunks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one sequence of this length fits the empty pool, all memory given."""
        return self.num_blocks_for(num_tokens) <= self._pool.max_usable

    def num_blocks_for_choices(self, num_prompt_tokens: int, num_tokens: int, n: int) -> int:
        """Blocks that n forks of one prompt hold side by side when each has `num_tokens` in the cache."""
        # The block of the last prompt token is written by each fork, so it is nobody's to share.
        num_shared = (num_prompt_tokens - 1) // self.block_size
        return num_shared + n * (self.num_blocks_for(num_tokens) - num_shared)

    def is_computing(self, block_hash: bytes) -> bool:
        """Whether a running sequence is about to publish this block."""
        return block_hash in self._computing

    def stats(self, sequences: Iterable[Sequence]) -> KVStats:
        """Counts blocks and slots. `sequences`: all that hold blocks."""
        wasted = count_wasted_slots(sequences, self.block_size)
        pool = self._pool
        num_used = pool.num_usable - pool.num_free
        return KVStats(
            pool.max_usable,
            num_used,
            pool.max_usable - num_used,
            pool.num_free_cached,
            num_used * self.block_size,
            wasted,
            pool.num_usable,
        )

    # --- a step ---------------------------------------------------------------------------------------------------

    def forget_copies(self) -> None:
        """The copies of the last plan are done, or never will be, and a step that was in flight has ended.

        Blocks that were given up meanwhile may be given out again.
        """
        self._copies.clear()
        self._copy_sources.clear()
        for block in self._set_aside:
            self._pool.release(block)
        self._set_aside.clear()

    def copies(self) -> tuple[tuple[int, int], ...]:
        """Copies (source, destination) due since `forget_copies`; no block is both a source and a destination."""
        return tuple(self._copies)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Looks up the known tokens of a sequence without blocks. Changes nothing but the memo of its hashes."""
        if not self._is_caching:
            return NO_MATCH
        num_tokens = len(sequence.token_ids)
        hashes = self._hashes(sequence, num_tokens // self.block_size)
        blocks = self.cache.lookup(hashes)
        num_hits = len(blocks)
        awaited = hashes[num_hits] if num_hits < len(hashes) else None
        if awaited is not None and not self._is_sooner(self._computing.get(awaited), sequence):
            awaited = None
        num_hit_tokens = min(num_hits * self.block_size, num_tokens - 1)
        return PrefixMatch(tuple(blocks[: self.num_blocks_for(num_hit_tokens)]), num_hit_tokens, awaited)

    def admit(self, sequence: Sequence, match: PrefixMatch, num_tokens: int, num_spare_blocks: int) -> bool:
        """Gives a sequence its hits and room for `num_tokens` more: all of it, or False and the sequence has nothing.

        All its known tokens must fit and leave `num_spare_blocks`, though only `num_tokens` are allocated now: a
        prompt let in by halves would only be preempted.
        """
        assert not sequence.block_table, "an admitted sequence holds no blocks yet"
        num_revived = sum(1 for block in match.blocks if block.ref_count == 0)
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(match.blocks)
        if match.num_tokens % self.block_size and match.blocks[-1].ref_count > 0:
            num_new += 1
        if not self._pool.make_room(num_new, num_revived + num_spare_blocks):
            return False
        for block in match.blocks:
            self._pool.acquire(block)
        sequence.block_table = [block.block_id for block in match.blocks]
        sequence.num_computed_tokens = match.num_tokens
        allocated = self.allocate(sequence, num_tokens)
        assert allocated, "room was counted before"
        if self._is_caching:
            full = sequence.block_hashes
            for index in range(match.num_tokens // self.block_size, len(full)):
                self._computing.setdefault(full[index], sequence)
            for index, keys in sequence.request.marks.keys.items() if match.blocks else ():
                if index < len(match.blocks):
                    self.cache.mark(full[index], keys)
        return True

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the next `num_tokens` slots of a sequence its own to write: all, or False and its table stays."""
        size = self.block_size
        table = sequence.block_table
        computed = sequence.num_computed_tokens
        num_new = -(-(computed + num_tokens) // size) - len(table)
        tail: Block | None = None
        if computed % size:
            tail = self._pool.blocks[table[computed // size]]
            if tail.ref_count == 1:
                if tail.block_hash is not None:
                    # The last token of a fully cached prompt is computed again, in place: nobody else looks at the
                    # block, and it is published again once computed.
                    self.cache.remove(tail)
                tail = None
        if num_new <= 0 and tail is None:
            return True
        blocks = self._pool.allocate(max(num_new, 0) + (tail is not None))
        if blocks is None:
            return False
        if tail is not None:
            copy = blocks.pop()
            table[computed // size] = copy.block_id
            self._copies.append((tail.block_id, copy.block_id))
            self._copy_sources.add(tail.block_id)
            self._release(tail)
        table.extend([block.block_id for block in blocks])
        return True

    def allocate_spare(self, sequence: Sequence, num_tokens: int, num_more: int) -> int:
        """Slots behind those of the next `num_tokens`, which are its own already: up to `num_more`; returns how many.

        Only what is free now and needs no memory is taken. Give back what was not used with `trim`.
        """
        computed = sequence.num_computed_tokens + num_tokens
        num_slots = (len(sequence.block_table) + self._pool.num_free) * self.block_size
        num_more = max(0, min(num_more, num_slots - computed))
        num_new = self.num_blocks_for(computed + num_more) - len(sequence.block_table)
        if num_new > 0:
            blocks = self._pool.allocate(num_new)
            assert blocks is not None, "they were counted as free"
            sequence.block_table.extend([block.block_id for block in blocks])
        return num_more

    def trim(self, sequence: Sequence, num_more: int = 0) -> None:
        """Takes back the blocks behind those of its computed tokens and so many more."""
        num_kept = self.num_blocks_for(sequence.num_computed_tokens + num_more)
        table = sequence.block_table
        if len(table) == num_kept:
            return
        for block_id in reversed(table[num_kept:]):
            self._release(self._pool.blocks[block_id])
        del table[num_kept:]
        sequence.table_version += 1

    def make_room(self, wanted: Iterable[tuple[Sequence, int]]) -> bool:
        """Whether `allocate` would succeed for each of these in turn; grows for it where it may."""
        num_new = 0
        num_writers: dict[int, int] = {}
        for sequence, num_tokens in wanted:
            computed = sequence.num_computed_tokens
            num_new += max(0, self.num_blocks_for(computed + num_tokens) - len(sequence.block_table))
            if num_tokens and computed % self.block_size:
                tail = sequence.block_table[computed // self.block_size]
                num_writers[tail] = num_writers.get(tail, 0) + 1
        for block_id, count in num_writers.items():
            # The last one that holds a block may write into it; all others need a copy.
            num_new += min(count, self._pool.blocks[block_id].ref_count - 1)
        return self._pool.make_room(num_new)

    def publish(self, sequence: Sequence, num_computed_before: int, num_final: int | None = None) -> None:
        """Enters into the cache the blocks that became full since `num_computed_before` tokens were computed.

        Call it once per commit with tokens that are final: what is published is offered to everybody. `num_final`: so
        many of the computed tokens; None: all of them. Blocks that are published already are passed over.
        """
        first = num_computed_before // self.block_size
        last = (sequence.num_computed_tokens if num_final is None else num_final) // self.block_size
        if first == last or not self._is_caching:
            return
        hashes = self._hashes(sequence, last)
        marks = sequence.request.marks.keys
        for index in range(first, last):
            self._disown(hashes[index], sequence)
            block = self._pool.blocks[sequence.block_table[index]]
            if block.block_hash is None:
                self.cache.store(hashes[index], block)
            if index in marks:
                self.cache.mark(hashes[index], marks[index])

    def fork(self, elder: Sequence, sibling: Sequence, num_tokens: int) -> None:
        """Lets a sibling without blocks share the elder's first `num_tokens` computed tokens."""
        assert num_tokens <= elder.num_computed_tokens, "only computed tokens can be shared"
        assert not sibling.block_table, "a sibling forks once"
        table = elder.block_table[: self.num_blocks_for(num_tokens)]
        for block_id in table:
            self._pool.acquire(self._pool.blocks[block_id])
        sibling.block_table = table
        num_known = max(num_tokens, len(elder.request.prompt_token_ids))
        sibling.block_hashes = elder.block_hashes[: num_known // self.block_size]
        sibling.num_computed_tokens = num_tokens

    def free(self, sequence: Sequence) -> None:
        """Takes back all blocks of a sequence and sets its computed count to 0; what was published can still be hit."""
        for index in range(sequence.num_computed_tokens // self.block_size, len(sequence.block_hashes)):
            self._disown(sequence.block_hashes[index], sequence)
        # Last block first: tails are evicted before the heads that other prompts may share.
        for block_id in reversed(sequence.block_table):
            self._release(self._pool.blocks[block_id])
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.table_version += 1

    def shrink(self, num_chunks: int) -> list[int]:
        """Gives up so many chunks, or as many as no sequence holds a block of, down to the floor; their indices.

        Cached prefixes in them are forgotten, chunk by chunk: a chain may lose its head before its tail. Call it
        between two steps.
        """
        return self._pool.shrink(num_chunks)

    def reset(self) -> None:
        """Forgets all cached content (new weights). No sequence may hold blocks; starts a new epoch."""
        self.forget_copies()
        assert self._pool.num_free == self._pool.num_usable, "reset with blocks in use"
        self.cache.clear()
        self._pool.forget_hashes()
        self._computing.clear()
        self.epoch += 1

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that counts, tables and cache agree (for tests: O(blocks)). `sequences`: all that hold blocks."""
        held: dict[int, int] = {}
        for sequence in sequences:
            for block_id in sequence.block_table:
                held[block_id] = held.get(block_id, 0) + 1
        for block in self._set_aside:
            held[block.block_id] = held.get(block.block_id, 0) + 1
        free_ids = self._pool.free_ids()
        free = set(free_ids)
        assert len(free) == len(free_ids), "a block is free twice"
        self._pool.check()
        for block in self._pool.committed():
            assert block.ref_count == held.get(block.block_id, 0), f"block {block.block_id}: wrong reference count"
            assert (block.ref_count == 0) == (block.block_id in free), f"block {block.block_id} is lost"
            assert block.block_hash is None or self.cache.lookup([block.block_hash]) == [block]
            held.pop(block.block_id, None)
            free.discard(block.block_id)
        assert not held and not free, "a block that is not there is held or free"
        assert len(self.cache) == sum(block.block_hash is not None for block in self._pool.blocks)
        self.cache.check()
        cached = sum(self._pool.blocks[block_id].block_hash is not None for block_id in free_ids)
        assert cached == self._pool.num_free_cached, "cached blocks are miscounted"

    # --- parts ----------------------------------------------------------------------------------------------------

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The sequence's hashes, extended to at least its first `num_blocks` blocks."""
        hashes = sequence.block_hashes
        if len(hashes) < num_blocks:
            size = self.block_size
            num_shared = sequence.request.marks.num_shared_blocks
            parent = hashes[-1] if hashes else self._root(sequence.request)
            token_ids = sequence.token_ids
            for index in range(len(hashes), num_blocks):
                if index == num_shared and index:
                    parent = salted_hash(parent, self._own_root(sequence.request))
                parent = self._hasher.hash_block(parent, token_ids[index * size : (index + 1) * size])
                hashes.append(parent)
        return hashes

    def _root(self, request: Request) -> bytes:
        """What the first block of a prompt follows."""
        if request.marks.num_shared_blocks:
            return shared_root_hash(self._model_revision, request.adapter, self.block_size)
        return self._own_root(request)

    def _own_root(self, request: Request) -> bytes:
        return root_hash(self._model_revision, request.adapter, request.cache_salt, self.block_size)

    @staticmethod
    def _is_sooner(owner: Sequence | None, sequence: Sequence) -> bool:
        # Waiting for somebody of lower priority would hand its priority on.
        return owner is not None and owner.request.priority <= sequence.request.priority

    def _disown(self, block_hash: bytes, sequence: Sequence) -> None:
        if self._computing.get(block_hash) is sequence:
            del self._computing[block_hash]

    def _release(self, block: Block) -> None:
        if block.ref_count == 1 and (self.is_in_flight or block.block_id in self._copy_sources):
            # Its content is still to be copied in this step, or written: it must not be given out before.
            self._set_aside.append(block)
        else:
            self._pool.release(block)
