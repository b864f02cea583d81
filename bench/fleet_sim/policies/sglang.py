"""SGLang's `cache_aware` routing: a radix tree of the characters each worker was sent.

Source: SGLang's router, https://github.com/sgl-project/sglang (sgl-router, cache_aware and tree), in words and code of
our own. Left out: threads and their races; eviction takes the longest unused leaves as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.requests import Request

MIN_SPREAD = 64
MIN_RATIO = 1.5
MATCH_THRESHOLD = 0.3
EVICTION_PERIOD_S = 120.0
MAX_CHARS = 2**26


@dataclass(slots=True, eq=False)
class _Node:
    text: str
    parent: _Node | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    """By first character."""
    last_used: dict[int, int] = field(default_factory=dict)
    """Worker → when, counted in calls."""


class Tree:
    """Mutable: one tree for all workers; each node says whose it is."""

    def __init__(self, workers: Sequence[int]) -> None:
        self.num_chars = dict.fromkeys(workers, 0)
        self._root = _Node("", last_used=dict.fromkeys(workers, 0))
        self._num_calls = 0

    def match(self, text: str) -> tuple[int, int | None]:
        """Characters matched by anybody, and the first owner of the deepest node reached; None: nobody's."""
        self._num_calls += 1
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                break
            shared = _shared(child.text, text, at)
            node, at = child, at + shared
            if shared < len(child.text):
                break
        owner = next(iter(node.last_used), None)
        walk: _Node | None = node
        while walk is not None and owner is not None:
            walk.last_used[owner] = self._num_calls
            walk = walk.parent
        return at, owner

    def insert(self, text: str, worker: int) -> None:
        """Every node on the way is the worker's, too."""
        self._num_calls += 1
        node, at = self._root, 0
        node.last_used[worker] = self._num_calls
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _Node(text[at:], node)
            else:
                shared = _shared(child.text, text, at)
                if shared < len(child.text):
                    child = self._split(child, shared)
            if worker not in child.last_used:
                self.num_chars[worker] += len(child.text)
            child.last_used[worker] = self._num_calls
            node, at = child, at + len(child.text)

    def smallest(self, workers: Sequence[int]) -> int:
        """The worker that was sent the fewest different characters."""
        return min(workers, key=lambda worker: (self.num_chars[worker], worker))

    def evict(self, max_chars: int = MAX_CHARS) -> None:
        """Takes the longest unused leaves from workers that have more."""
        for worker, num_chars in self.num_chars.items():
            excess = num_chars - max_chars
            while excess > 0:
                leaf = min(self._leaves(worker), key=lambda node: node.last_used[worker])
                excess -= len(leaf.text)
                self._drop(leaf, worker)

    def _leaves(self, worker: int) -> Iterator[_Node]:
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            below = [child for child in node.children.values() if worker in child.last_used]
            todo += below
            if worker in node.last_used and not below:
                yield node

    def _drop(self, node: _Node, worker: int) -> None:
        del node.last_used[worker]
        self.num_chars[worker] -= len(node.text)
        if not node.last_used and not node.children and node.parent is not None:
            del node.parent.children[node.text[0]]

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        assert node.parent is not None
        upper = _Node(node.text[:at], node.parent, last_used=dict(node.last_used))
        node.parent.children[upper.text[0]] = upper
        node.text, node.parent = node.text[at:], upper
        upper.children[node.text[0]] = node
        return upper


def _shared(edge: str, text: str, at: int) -> int:
    """Characters of an edge that the text goes on with."""
    if text.startswith(edge, at):
        return len(edge)
    low, high = 0, len(edge)
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if text.startswith(edge[:middle], at) else (low, middle)
    return low


def is_imbalanced(loads: Sequence[int]) -> bool:
    """Both limits are passed."""
    return max(loads) - min(loads) > MIN_SPREAD and max(loads) > MIN_RATIO * min(loads)


class SGLang(Policy):
    """Each router has a tree and counts of its own."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._trees: dict[str, Tree] = {}
        self._evicted_s = 0.0

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """Shortest queue when imbalanced; else the best match, or the emptiest tree."""
        model, text = request.prompt.model, request.prompt.text.decode()
        tree = self._trees.setdefault(model, Tree(candidates))
        if now_s - self._evicted_s >= EVICTION_PERIOD_S:
            self._evicted_s = now_s
            for other in self._trees.values():
                other.evict()
        loads = {worker: self.around.in_flight[worker] for worker in candidates}
        if is_imbalanced(list(loads.values())):
            worker = min(candidates, key=lambda index: (loads[index], index))
        else:
            num_matched, owner = tree.match(text)
            is_hit = owner is not None and num_matched / len(text) > MATCH_THRESHOLD
            worker = owner if is_hit and owner is not None else tree.smallest(candidates)
        tree.insert(text, worker)
        return worker
