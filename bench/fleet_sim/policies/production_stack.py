"""vLLM production-stack's `prefixaware` routing: a trie of 128-character chunks that only grows, and chance.

Source: vLLM production-stack, https://github.com/vllm-project/production-stack (routing_logic, hashtrie), in words and
code of our own. Left out: `prefixMinMatchLength` (0 by default), and its chunks' hash (identity is the chunk itself).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.requests import Request

CHUNK_CHARS = 128


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)


class Trie:
    """Mutable: who was sent which beginnings. Nothing ever leaves it."""

    def __init__(self) -> None:
        self._root = _Node()

    def match(self, text: str, live: set[int]) -> set[int]:
        """Live workers at the deepest known chunk; all of them where the first one is new."""
        node, found = self._root, live
        for chunk in _chunks(text):
            child = node.children.get(chunk)
            if child is None or not child.workers & live:
                break
            node, found = child, child.workers & live
        return found

    def insert(self, text: str, worker: int) -> None:
        """The whole path for a worker."""
        node = self._root
        for chunk in _chunks(text):
            node = node.children.setdefault(chunk, _Node())
            node.workers.add(worker)


def _chunks(text: str) -> Iterator[str]:
    return (text[start : start + CHUNK_CHARS] for start in range(0, len(text), CHUNK_CHARS))


class ProductionStack(Policy):
    """Each router has a trie of its own; load does not count."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._tries: dict[str, Trie] = {}

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """By chance among those that were sent the longest known beginning."""
        trie = self._tries.setdefault(request.prompt.model, Trie())
        worker = self.around.rng.choice(sorted(trie.match(request.prompt.joined, set(candidates))))
        trie.insert(request.prompt.joined, worker)
        return worker
