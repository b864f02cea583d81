"""What the hub keeps of one model beside its public entry: the operation under way, and where it is to go."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass

from naru_worker.core.hub.model import Footprint, ModelEntry, Tier
from naru_worker.core.residency import ModelState


class Operation(enum.Enum):
    """What is under way for a model: at most one."""

    FETCH = "fetch"
    RAISE = "raise"
    LOAD = "load"
    DRAIN = "drain"
    UNLOAD = "unload"
    DROP = "drop"


class Place(enum.IntEnum):
    """Where a model's copy is when no operation moves it."""

    NONE = 0
    FETCHED = 1
    """Packed and known by its footprint; nothing of it in memory."""
    HOST = 2
    LOADED = 3
    DRAINED = 4
    """Loaded, but its engine takes no request any more: the only way on is out."""


_STATE_OF_OPERATION = {
    Operation.FETCH: ModelState.FETCHING,
    Operation.RAISE: ModelState.FETCHING,
    Operation.LOAD: ModelState.LOADING,
    Operation.DRAIN: ModelState.DRAINING,
    Operation.UNLOAD: ModelState.DRAINING,
    Operation.DROP: ModelState.HOST,
}
_STATE_OF_PLACE = {
    Place.NONE: ModelState.COLD,
    Place.FETCHED: ModelState.FETCHING,
    Place.HOST: ModelState.HOST,
    Place.DRAINED: ModelState.DRAINING,
}


@dataclass(slots=True, eq=False)
class Record:
    """Mutable; owned by the hub. `entry` is what others may read."""

    entry: ModelEntry
    number: int
    """Order in which names became known."""
    place: Place = Place.NONE
    operation: Operation | None = None
    operation_spec: Hashable = None
    """What the operation under way brings."""
    is_stopping: bool = False
    generation_spec: Hashable = None
    """What the newest generation stands for, also when the model was forgotten since."""

    footprint: Footprint | None = None
    """The last one known; the entry shows it while it belongs to what is wanted."""
    footprint_spec: Hashable = None
    """What `footprint` belongs to."""

    goal: Tier = Tier.COLD
    """Where it goes and rests without requests: the last asked tier, or where the hub itself put it since."""
    moved: Tier | None = None
    """Where a move has put it since the last order; None: nowhere."""
    is_demanded: bool = False
    """A request has come that found it not serving; it is brought up even when that request leaves."""
    is_for_request: bool = False

    is_failed: bool = False
    is_permanent: bool = False
    is_without_room: bool = False
    """Failed for want of room that only pinned models could give."""
    failed_at_s: float = -math.inf

    eviction: str = ""
    """Why the hub takes it down; empty: it does not."""
    why: str = ""
    """Reason of the last change of state."""
    wait_reason: str = ""
    """Why it stays below its goal, where it waits for nothing."""
    drain_deadline_s: float = math.inf
    """When its running requests are ended at last."""
    issued_deadline_s: float = math.inf
    """The deadline that the drain under way knows."""
    is_unloading_to_host: bool = False

    queued_s: float | None = None
    """Since when it waits for a slot or for room; None: it does not."""
    blocked_since_s: float | None = None
    """Since when no set of idle models could make room for it."""
    is_committed: bool = False
    """Models were evicted for it: it stays before all others until it is loaded."""

    trim_bytes: int = 0
    """KV it was told to give up and has not reported yet."""
    trim_until_s: float = -math.inf
    """When the order is taken for lost."""
    no_trim_until_s: float = -math.inf
    """It gave less than it was told to: not asked again before."""
    uses: int = 0
    popularity: float = 0.0
    """Requests, each counting half after every half-life since; of the time `popularity_at_s`."""
    popularity_at_s: float = 0.0
    from_host_s: float = 0.0
    """What its last load from host memory took; 0: there was none."""
    from_disk_s: float = 0.0

    def popularity_now(self, now_s: float, half_life_s: float) -> float:
        """Its popularity, faded until now."""
        return self.popularity * math.exp2((self.popularity_at_s - now_s) / half_life_s)

    @property
    def name(self) -> str:
        """Of the model."""
        return self.entry.name

    @property
    def wanted(self) -> Tier:
        """Where it is to be now: requests raise it above its goal."""
        if self.entry.spec is None:
            return Tier.COLD
        return Tier.ACTIVE if self.entry.num_held or self.is_demanded else self.goal

    @property
    def is_moved(self) -> bool:
        """Whether it goes where a move has put it, not where it was ordered."""
        return self.moved is not None and self.goal is self.moved

    @property
    def near(self) -> Tier:
        """How near to the engine it is, or is on its way to: what is below takes it down."""
        here = Tier.ACTIVE if self.is_serving else Tier.HOST if self.place is Place.HOST else Tier.COLD
        return max(self.wanted, here)

    @property
    def is_other_copy(self) -> bool:
        """Whether what is in memory is not what is asked for."""
        return self.place >= Place.HOST and self.entry.loaded_spec != self.entry.spec

    @property
    def is_serving(self) -> bool:
        """Whether its requests go to the engine."""
        return self.place is Place.LOADED and self.operation is None

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is left of it but its name."""
        return self.place is Place.NONE and self.operation is None

    def state(self) -> ModelState:
        """Its public state, derived from all else."""
        if self.is_failed and self.operation in (None, Operation.DROP):
            return ModelState.FAILED
        if self.operation is not None:
            return _STATE_OF_OPERATION[self.operation]
        if self.place is Place.LOADED:
            return ModelState.ACTIVE if self.entry.num_in_flight else ModelState.READY
        return _STATE_OF_PLACE[self.place]
