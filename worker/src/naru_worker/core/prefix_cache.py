"""Finds blocks by the tokens in them: chained hashes of full blocks, and the map from hash to block.

The KV manager asks and tells. Routers' names of prompts' beginnings hang on the blocks here and leave with them.
The hashes depend on content alone, never on the process, so that all workers of a model agree on them.

Not covered: two prompts whose 128-bit BLAKE2b chains collide would share a block (2**64 work, and the salt is unknown
to other tenants).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from naru_worker.core.blocks import Block
from naru_worker.core.route_marks import RouteMarks

HASH_BYTES = 16


def root_hash(model_revision: str, adapter: str, cache_salt: bytes, block_size: int) -> bytes:
    """The parent of every first block: what else but the tokens decides about keys and values, and who may share them.

    `model_revision` must name the exact weights. Fields are length-prefixed, so no two tuples are spelled alike.
    """
    return _root(model_revision, adapter, cache_salt, block_size, b"naru.kv.root")


def shared_root_hash(model_revision: str, adapter: str, block_size: int) -> bytes:
    """The parent of the first block of a part that all tenants share; no prompt of one tenant alone begins so."""
    return _root(model_revision, adapter, b"", block_size, b"naru.kv.shared")


def salted_hash(parent: bytes, root: bytes) -> bytes:
    """What the first block behind a shared part follows: its last hash, and `root_hash` of the tenant."""
    return hashlib.blake2b(parent, key=root, digest_size=HASH_BYTES, person=b"naru.kv.own").digest()


def _root(model_revision: str, adapter: str, cache_salt: bytes, block_size: int, person: bytes) -> bytes:
    key = hashlib.blake2b(cache_salt, digest_size=32, person=b"naru.kv.salt").digest()
    digest = hashlib.blake2b(key=key, digest_size=HASH_BYTES, person=person)
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


class PrefixCache:
    """The map from hash to block. Holds no references: a block leaves it when the pool gives it out anew, or up."""

    def __init__(self) -> None:
        self.marks = RouteMarks()
        """Route keys of the blocks in the map."""
        self._blocks: dict[bytes, Block] = {}

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
        return True

    def mark(self, block_hash: bytes, keys: Iterable[bytes]) -> None:
        """Notes the route keys that a block completes, where it is in the map."""
        if block_hash in self._blocks:
            self.marks.mark(block_hash, keys)

    def remove(self, block: Block) -> None:
        """Forgets the content of a block that is in the map."""
        assert block.block_hash is not None, "only a stored block can be removed"
        del self._blocks[block.block_hash]
        self.marks.forget(block.block_hash)
        block.block_hash = None

    def clear(self) -> None:
        """Forgets everything; the pool must clear the hashes in its blocks."""
        self._blocks.clear()
        self.marks.clear()

    def hashes(self) -> tuple[bytes, ...]:
        """All hashes known now, oldest first."""
        return tuple(self._blocks)

    def check(self) -> None:
        """Asserts that route keys hang on blocks that are here (for tests: O(keys))."""
        self.marks.check()
        assert self.marks.block_hashes() <= self._blocks.keys(), "a key of a block that is gone"
