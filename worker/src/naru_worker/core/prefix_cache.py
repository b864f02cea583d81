"""Finds blocks by the tokens in them: chained hashes of full blocks, and the map from hash to block.

The KV manager asks and tells; a shell outside drains the events (for a router's index of who has what). The hashes
depend on content alone, never on the process, so that all workers of a model agree on them.

Not covered: two prompts whose 128-bit BLAKE2b chains collide would share a block (2**64 work, and the salt is unknown
to other tenants).
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from naru_worker.core.blocks import Block

HASH_BYTES = 16

MAX_EVENTS = 4096
"""Events kept for a shell that does not drain; about 1 MB."""


def root_hash(model_revision: str, adapter: str, cache_salt: bytes, block_size: int) -> bytes:
    """The parent of every first block: what else but the tokens decides about keys and values, and who may share them.

    `model_revision` must name the exact weights. Fields are length-prefixed, so no two tuples are spelled alike.
    """
    key = hashlib.blake2b(cache_salt, digest_size=32, person=b"naru.kv.salt").digest()
    digest = hashlib.blake2b(key=key, digest_size=HASH_BYTES, person=b"naru.kv.root")
    for field in (model_revision.encode(), adapter.encode(), str(block_size).encode()):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


class BlockHasher:
    """Hashes blocks of one size: ``H(parent, tokens)``."""

    def __init__(self, block_size: int) -> None:
        self._pack = struct.Struct(f"<{block_size}I").pack

    def hash_block(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Hash of a full block that follows `parent`. `token_ids`: block_size ids in [0, 2**32)."""
        content = parent + self._pack(*token_ids)
        return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"naru.kv.block").digest()


class CacheEventKind(enum.Enum):
    """What happened to a hash in the cache."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the cache. `block_hash` is empty for CLEARED."""

    kind: CacheEventKind
    block_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """What was drained. When not `complete`, events were lost: take `PrefixCache.hashes` as the new truth instead."""

    events: tuple[CacheEvent, ...]
    complete: bool


class PrefixCache:
    """The map from hash to block. Holds no references: a block leaves it when the pool gives it out anew, or up."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._events: list[CacheEvent] = []
        self._max_events = max_events
        self._is_complete = True

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._blocks

    def lookup(self, block_hashes: Iterable[bytes]) -> list[Block]:
        """Blocks of the longest known prefix of a chain."""
        found = []
        get = self._blocks.get
        for block_hash in block_hashes:
            block = get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def store(self, block_hash: bytes, block: Block) -> bool:
        """Enters a full, computed block. False when the content is already there in another block: the first stays."""
        if block_hash in self._blocks:
            return False
        assert block.block_hash is None, "a block has one content"
        block.block_hash = block_hash
        self._blocks[block_hash] = block
        self._record(CacheEvent(CacheEventKind.STORED, block_hash))
        return True

    def remove(self, block: Block) -> None:
        """Forgets the content of a block that is in the map."""
        assert block.block_hash is not None, "only a stored block can be removed"
        del self._blocks[block.block_hash]
        self._record(CacheEvent(CacheEventKind.REMOVED, block.block_hash))
        block.block_hash = None

    def clear(self) -> None:
        """Forgets everything; the pool must clear the hashes in its blocks."""
        self._blocks.clear()
        self._events.clear()
        self._is_complete = True
        self._record(CacheEvent(CacheEventKind.CLEARED))

    def hashes(self) -> tuple[bytes, ...]:
        """All hashes known now, oldest first."""
        return tuple(self._blocks)

    def drain_events(self) -> CacheEvents:
        """Takes the events since the last call."""
        drained = CacheEvents(tuple(self._events), self._is_complete)
        self._events.clear()
        self._is_complete = True
        return drained

    def _record(self, event: CacheEvent) -> None:
        if not self._is_complete:
            return
        if len(self._events) >= self._max_events:
            # A list with a hole is worse than none: the reader would trust hashes that are gone.
            self._events.clear()
            self._is_complete = False
            return
        self._events.append(event)
