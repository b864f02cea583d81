"""Which route keys a prefix cache holds: each hangs on the block that completes it, and comes and goes with it.

The prefix cache tells of blocks, the KV manager of the keys that a request's blocks complete; the engine takes what has
changed and hands it on to routers. The keys are opaque: routers made them. There are at most as many as blocks, times a
small factor, whatever is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

MAX_KEYS_PER_BLOCK = 32
"""A block of sixteen long tokens completes a few chunks of 64 bytes; more come only of keys that were made up."""


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Keys that came and went, net: none is in both. Those removed were held before."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class NetChanges:
    """Comings and goings added up: what came and went again, or went and came again, has not changed. Mutable."""

    __slots__ = ("_added", "_removed")

    def __init__(self) -> None:
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def add(self, key: bytes) -> None:
        """A key that was not held is held now."""
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def remove(self, key: bytes) -> None:
        """A key that was held is held no more."""
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None

    def take(self) -> KeyChanges:
        """All since the last call."""
        changes = KeyChanges(tuple(self._added), tuple(self._removed))
        self._added, self._removed = {}, {}
        return changes


class RouteMarks:
    """Keys by block hash. Each key hangs on one block: the last that was said to complete it."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[bytes, ...]] = {}
        """By block hash, oldest first."""
        self._blocks: dict[bytes, bytes] = {}
        """Block hash by key."""
        self._changes = NetChanges()

    def __len__(self) -> int:
        """Keys held."""
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def has_changes(self) -> bool:
        """Whether `take` would give anything."""
        return bool(self._changes)

    def mark(self, block_hash: bytes, keys: Iterable[bytes]) -> None:
        """The block, which is in the cache, completes these keys. Of very many on one block the oldest go."""
        for key in keys:
            before = self._blocks.get(key)
            if before == block_hash:
                continue
            if before is not None:
                self._detach(before, key)
            else:
                self._changes.add(key)
            self._blocks[key] = block_hash
            held = self._keys.get(block_hash, ())
            if len(held) >= MAX_KEYS_PER_BLOCK:
                del self._blocks[held[0]]
                self._changes.remove(held[0])
                held = held[1:]
            self._keys[block_hash] = (*held, key)

    def forget(self, block_hash: bytes) -> None:
        """The block has left the cache, and its keys with it."""
        for key in self._keys.pop(block_hash, ()):
            del self._blocks[key]
            self._changes.remove(key)

    def clear(self) -> None:
        """The cache is empty."""
        for key in self._blocks:
            self._changes.remove(key)
        self._keys.clear()
        self._blocks.clear()

    def take(self) -> KeyChanges:
        """What has changed since the last call."""
        return self._changes.take()

    def block_hashes(self) -> Set[bytes]:
        """Blocks that complete a key."""
        return self._keys.keys()

    def check(self) -> None:
        """Asserts that both maps agree (for tests: O(keys))."""
        pairs = {key: block_hash for block_hash, keys in self._keys.items() for key in keys}
        assert pairs == self._blocks, "a key hangs on no block, or on two"
        assert all(0 < len(keys) <= MAX_KEYS_PER_BLOCK for keys in self._keys.values())

    def _detach(self, block_hash: bytes, key: bytes) -> None:
        left = tuple(each for each in self._keys[block_hash] if each != key)
        if left:
            self._keys[block_hash] = left
        else:
            del self._keys[block_hash]
