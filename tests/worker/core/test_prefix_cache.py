"""Block hashes and the map from hash to block."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from naru_worker.core.blocks import Block
from naru_worker.core.prefix_cache import BlockHasher, PrefixCache, root_hash
from naru_worker.core.route_marks import KeyChanges

CHAIN = """
from naru_worker.core.prefix_cache import BlockHasher, root_hash
parent = root_hash("rev", "adapter", b"salt", 4)
for start in range(0, 12, 4):
    parent = BlockHasher(4).hash_block(parent, range(start, start + 4))
    print(parent.hex())
"""


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_are_equal_in_every_process(seed: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHAIN],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    parent = root_hash("rev", "adapter", b"salt", 4)
    expected = []
    for start in range(0, 12, 4):
        parent = BlockHasher(4).hash_block(parent, range(start, start + 4))
        expected.append(parent.hex())
    assert child.stdout.split() == expected


def test_everything_that_decides_about_content_or_sharing_is_in_the_root() -> None:
    roots = [
        root_hash(*fields)
        for fields in itertools.product(("a", "b", "ab"), ("", "x", "b"), (b"", b"t1", b"t2"), (16, 32))
    ]
    assert len(set(roots)) == len(roots)
    # Lengths are part of it: moving a letter from one field to the next is another root.
    assert root_hash("ab", "c", b"", 16) != root_hash("a", "bc", b"", 16)


def test_a_hash_depends_on_all_tokens_before() -> None:
    hasher = BlockHasher(2)
    root = root_hash("a", "", b"", 2)
    first = hasher.hash_block(root, [1, 2])
    assert hasher.hash_block(first, [3, 4]) != hasher.hash_block(root, [3, 4])
    assert hasher.hash_block(hasher.hash_block(root, [1, 9]), [3, 4]) != hasher.hash_block(first, [3, 4])
    assert hasher.hash_block(root, [2, 1]) != first
    assert len(first) == 16


def test_lookup_gives_the_longest_known_prefix_only() -> None:
    cache = PrefixCache()
    blocks = [Block(index) for index in range(1, 5)]
    for index in (0, 1, 3):
        assert cache.store(b"%d" % index, blocks[index])
    assert cache.lookup([b"0", b"1", b"2", b"3"]) == blocks[:2]
    assert cache.lookup([b"9", b"0"]) == []


def test_the_first_block_with_a_content_stays() -> None:
    cache = PrefixCache()
    first, second = Block(1), Block(2)
    assert cache.store(b"h", first)
    assert not cache.store(b"h", second)
    assert cache.lookup([b"h"]) == [first]
    assert second.block_hash is None


def test_route_keys_come_and_go_with_their_block_and_are_told_once() -> None:
    cache = PrefixCache()
    block = Block(1)
    cache.mark(b"h", [b"early"])
    cache.store(b"h", block)
    cache.mark(b"h", [b"one", b"two"])
    assert cache.marks.take() == KeyChanges((b"one", b"two"))
    assert not cache.marks.has_changes
    cache.remove(block)
    assert cache.marks.take() == KeyChanges((), (b"one", b"two"))
    cache.store(b"h", block)
    cache.mark(b"h", [b"one"])
    cache.clear()
    assert cache.marks.take() == KeyChanges()
    assert len(cache.marks) == 0
