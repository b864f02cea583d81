"""The words of placement: what workers have, what is wanted, what was decided and why. Data alone.

Bytes of a worker are those of all its accelerators together; a copy that is cut over k of them takes a k-th on each of
the first k.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field


class HeldState(enum.IntEnum):
    """How a worker has a copy, best first: when there are too many, the best stay."""

    READY = 0
    """It takes requests."""
    COMING = 1
    """It is being fetched or loaded."""
    RESTING = 2
    """It belongs there and is not in memory: its worker evicted it, and a request brings it back."""
    FAILED = 3
    """Its load failed; the worker tries again by itself."""


class Near(enum.IntEnum):
    """What a worker has of a model that it does not hold, nearest first."""

    HOST = 0
    """Packed, in its host memory."""
    DISK = 1
    """Files or packed image on the disk of its node."""
    FAR = 2
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Held:
    """One copy on one worker."""

    state: HeldState = HeldState.READY
    num_bytes: int = 0
    """What it takes, or will when it is loaded; 0: not known."""
    is_booked: bool = True
    """Its bytes are in the worker's used bytes. A load that has not begun is not."""
    num_in_flight: int = 0
    last_used_s: int = 0
    """Unix seconds; 0: never."""
    is_pinned: bool = False
    priority: int = 100
    """Weight in the choice of victims, in [1, 1000]: at 200 it is twice as hard to evict as at 100."""
    num_accelerators: int = 1
    is_wanted: bool = False
    """One of the copies that its model must have."""

    @property
    def is_idle(self) -> bool:
        """Whether it could leave: in memory, with nothing to do, and not pinned."""
        return self.state is HeldState.READY and self.num_in_flight == 0 and not self.is_pinned

    @property
    def booked_bytes(self) -> int:
        """Its part of the worker's used bytes."""
        return self.num_bytes if self.is_booked and self.state <= HeldState.COMING else 0

    @property
    def coming_bytes(self) -> int:
        """What it will take and has not booked yet."""
        return self.num_bytes if self.state is HeldState.COMING and not self.is_booked else 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order in which copies of one model stay: ready ones first, busy ones before idle ones, failed ones last."""
        if self.state is HeldState.READY:
            return 0, -self.num_in_flight, -self.last_used_s
        return int(self.state), 0, 0


@dataclass(frozen=True)
class WorkerSlot:
    """A worker that models may be placed on. Keep it while the worker's facts stay: sums are made once."""

    worker_id: str
    pool: str = "default"
    node: str = ""
    """The machine; empty: not told, and taken for its own."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """Key of a node label to its value."""
    budget_bytes: int = 0
    """0: not known."""
    used_bytes: int = 0
    """Booked of the budget: models, loads under way that have begun, and what belongs to no model."""
    host_budget_bytes: int = 0
    num_accelerators: int = 1
    holding: Mapping[str, Held] = field(default_factory=dict)
    near: Mapping[str, Near] = field(default_factory=dict)
    """Models that it does not hold and has something of."""
    failed: frozenset[str] = frozenset()
    """Models whose load failed here: tried elsewhere first."""
    is_leaving: bool = False
    """It is leaving or draining: nothing is placed there, and what it holds is wanted elsewhere."""

    @functools.cached_property
    def free_bytes(self) -> int:
        """Left of the budget when all loads under way are done; below 0 where they do not fit. 0: not known."""
        if self.budget_bytes <= 0:
            return 0
        return self.budget_bytes - self.used_bytes - sum(held.coming_bytes for held in self.holding.values())

    @functools.cached_property
    def idle_order(self) -> tuple[str, ...]:
        """Models whose copies could leave, the cheapest victim first: least priority, then longest without use."""
        idle = [(name, held) for name, held in self.holding.items() if held.is_idle and held.num_bytes > 0]
        idle.sort(key=lambda each: (each[1].priority, each[1].last_used_s, -each[1].num_bytes, each[0]))
        return tuple(name for name, _ in idle)

    @functools.cached_property
    def idle_bytes(self) -> int:
        """Of copies that could leave."""
        return sum(self.holding[name].booked_bytes for name in self.idle_order)

    @functools.cached_property
    def movable(self) -> tuple[str, ...]:
        """Models in memory that could leave once what runs has ended: not pinned."""
        return tuple(name for name, held in self.holding.items() if held.booked_bytes and not held.is_pinned)

    @functools.cached_property
    def movable_bytes(self) -> int:
        """Of `movable`."""
        return sum(self.holding[name].booked_bytes for name in self.movable)

    @functools.cached_property
    def num_in_the_way(self) -> int:
        """Requests in flight of `movable`."""
        return sum(self.holding[name].num_in_flight for name in self.movable)

    @functools.cached_property
    def num_unsized(self) -> int:
        """Copies that are coming and whose size nobody knows."""
        return sum(held.state is HeldState.COMING and held.num_bytes == 0 for held in self.holding.values())

    def domain(self, spread_key: str) -> str:
        """The failure domain it stands in: the label's value, else its node, else itself."""
        return self.domains.get(spread_key) or self.node or self.worker_id


@dataclass(frozen=True, slots=True)
class Want:
    """Copies that a model should have."""

    model: str
    pools: tuple[str, ...] = ()
    """Pools whose workers may hold it; empty: any."""
    num_copies: int = 1
    num_bytes: int = 0
    """Weights, KV floor and what comes with a copy; 0: not known."""
    num_accelerators: int = 1
    """That a copy is cut over."""
    spread_key: str = ""
    """Key of `WorkerSlot.domains` that copies are spread over; empty: by node."""
    is_pinned: bool = False
    priority: int = 100
    barred: frozenset[str] = frozenset()
    """Workers that may get none and keep none."""

    @property
    def order(self) -> tuple[bool, int, int, str]:
        """Who is placed first: pinned ones, then the largest share of one accelerator, then the more important."""
        return not self.is_pinned, -self.share_bytes, -self.priority, self.model

    @property
    def share_bytes(self) -> int:
        """Of a copy, on each of its accelerators."""
        return -(-self.num_bytes // max(1, self.num_accelerators))


@dataclass(frozen=True, slots=True)
class PlacedCopy:
    """One copy and why it is there."""

    worker_id: str
    is_new: bool
    victims: tuple[str, ...] = ()
    """Models whose idle copies there make room for it."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Copies that fit nowhere."""

    model: str
    num_missing: int
    reason: str
    """In numbers."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where all wanted copies belong."""

    copies: Mapping[str, tuple[PlacedCopy, ...]]
    """By model, in the order of their workers' names."""
    unplaced: tuple[Unplaced, ...] = ()
    """In the order of models."""

    def workers(self, model: str) -> tuple[str, ...]:
        """Workers of a model, in name order."""
        return tuple(copy.worker_id for copy in self.copies.get(model, ()))


@dataclass(frozen=True, slots=True)
class Choice:
    """Where one model comes up now, and why."""

    worker_id: str
    """Empty: nowhere."""
    victims: tuple[str, ...] = ()
    """Models whose idle copies there are likely to leave for it."""
    reasons: tuple[str, ...] = ()
