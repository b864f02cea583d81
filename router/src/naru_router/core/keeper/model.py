"""The keeper's words: what it sees, what it has moved, and why. Data alone.

The adapter makes the view of the route map and of the workers' frames, and carries the moves out.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from naru_proto.placement import Held, HeldState, WorkerSlot
from naru_proto.registry import FootprintRecord, ModelRecord


class Direction(enum.Enum):
    """Of a move."""

    UP = "up"
    """A copy comes up."""
    DOWN = "down"
    """A copy leaves the engine; the worker knows the model still."""


class Reason(enum.Enum):
    """Why a copy moves."""

    LEAVING = "leaving"
    """Its worker is about to end."""
    MISSING = "missing"
    """There are fewer copies than there must be."""
    HOT = "hot"
    """The copies there are have too much to do."""
    SPARE = "spare"
    """The others can do without it."""
    SURPLUS = "surplus"
    """There are more copies than there may be."""
    MISPLACED = "misplaced"
    """Its worker's pool may not hold it."""
    DEFRAGMENT = "defragment"
    """An idle copy makes room for a model that fits nowhere."""


@dataclass(frozen=True, slots=True)
class Move:
    """One copy is to come up or to leave."""

    model: str
    worker_id: str
    direction: Direction
    reason: Reason
    why: str
    """In numbers, for people."""

    @property
    def place(self) -> tuple[str, str]:
        """(model, worker id)."""
        return self.model, self.worker_id


@dataclass(frozen=True, slots=True)
class CopyLoad:
    """What one copy has to do, as its worker last told."""

    num_in_flight: int = 0
    """Running and waiting, of all routers."""
    queue_s: float = 0.0
    """Until a prompt that comes now is begun; 0: at once, or not known."""


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """How fast and how much the keeper moves."""

    max_moves: int = 4
    """Copies on their way at once."""
    cool_down_s: float = 10.0
    """Between two moves of one model, and before a move that was refused is asked for again."""
    max_cool_down_s: float = 600.0
    """Of a model whose moves fail, or whose copies are lost again soon: doubled up to this."""
    missing_s: float = 10.0
    """What is broken for so long is repaired: before that, the control plane may do so itself."""
    leaving_s: float = 3.0
    """The same for copies on a worker that leaves, which the control plane moves at once."""
    min_residency_s: float = 60.0
    """A copy that came up leaves for no other model before."""
    recent_s: float = 600.0
    """A model that was used within this time is wanted where its worker leaves."""
    headroom: float = 0.8
    """Share of its target that each copy may carry when one of them goes; below 1, so that it need not come back."""
    pending_s: float = 15.0
    """A move that shows no effect for so long is taken for lost."""
    move_deadline_s: float = 600.0
    """A copy that has not come up by then is not waited for."""
    starved_s: float = 5.0
    """Before a place is looked for again for a copy that fitted nowhere; doubled with each look in vain."""
    max_starved_s: float = 60.0
    max_searches: int = 2
    """Looks for a place at once: each takes some milliseconds on an event loop that has requests to serve."""
    defragment_s: float = 30.0
    """Between two looks for room among idle copies."""


@dataclass(frozen=True)
class KeeperView:
    """Everything of one instant. Built anew each second; its parts may be shared."""

    models: Mapping[str, ModelRecord]
    """Those that serve some entry, by the name that workers hold them under."""
    slots: tuple[WorkerSlot, ...]
    loads: Mapping[tuple[str, str], CopyLoad] = field(default_factory=dict)
    """(worker id, model); absent: nothing to do."""
    footprints: Mapping[str, FootprintRecord] = field(default_factory=dict)

    @cached_property
    def by_worker(self) -> dict[str, WorkerSlot]:
        """Slots by worker id."""
        return {slot.worker_id: slot for slot in self.slots}

    @cached_property
    def copies(self) -> dict[str, dict[str, Held]]:
        """Model to worker id to the copy there, in whatever state."""
        found: dict[str, dict[str, Held]] = {}
        for slot in self.slots:
            for model, held in slot.holding.items():
                found.setdefault(model, {})[slot.worker_id] = held
        return found

    def may_hold(self, worker_id: str, record: ModelRecord) -> bool:
        """Whether a worker's pool may hold the model."""
        return not record.pools or self.by_worker[worker_id].pool in record.pools

    def num_in_flight(self, worker_id: str, model: str) -> int:
        """The larger of what the stream and what the lease say: neither may lag behind unseen."""
        held = self.copies.get(model, {}).get(worker_id)
        load = self.loads.get((worker_id, model), _NO_LOAD)
        return max(load.num_in_flight, held.num_in_flight if held is not None else 0)


_NO_LOAD = CopyLoad()
UP_STATES = (HeldState.READY, HeldState.COMING)
