"""One model as the hub sees it: what is wanted of it, where it is, and what it takes. No engine, no files.

The hub's state machine owns and mutates entries; everybody else reads.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from naru_worker.core.residency import ModelState


class Tier(enum.IntEnum):
    """How close to the engine a model is wanted, from far to near."""

    COLD = 0
    """Known: the first request brings it up."""
    HOST = 1
    """Packed, and its weights in host memory."""
    ACTIVE = 2
    """Ready to serve."""


@dataclass(frozen=True, slots=True)
class Residency:
    """How hard a model holds its place."""

    pinned: bool = False
    priority: int = 100
    """Weight in the choice of victims, in [1, 1000]: at 200 it is twice as hard to evict as at 100."""
    min_residency_s: float = 0.0
    """After its load, nobody evicts it for so long; the hub adds its own guard against thrashing."""
    idle_ttl_s: float = 0.0
    """Without requests for so long it leaves by itself; 0: it stays."""
    keep_last_copy: bool = False
    """The last copy of a model that must have one: evicted after all others."""


PLAIN = Residency()
"""Nothing special."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a model takes, known from its image's index before anything is loaded."""

    weights_key: str
    """Content identity of the weights: models with equal keys share their pages, which count once."""
    weight_bytes: int
    kv_floor_bytes: int
    """The KV cache it starts with and never gives up while it is loaded."""
    workspace_bytes: int
    """Activations: one workspace serves all models, as large as the largest needs."""
    private_bytes: int = 0
    """What comes with each load beside weights and KV: tokenizer, tape, vectors."""
    num_accelerators: int = 1
    """That it is cut over. Each takes so many bytes; the worker counts those of its first one, which has all models."""
    asleep_bytes: int = 0
    """Of the private bytes: what stays in the engine's memory while a model that was loaded waits in host memory."""


@dataclass(slots=True, eq=False)
class ModelEntry:
    """Mutable; owned by the hub."""

    name: str
    generation: int = 0
    fencing_token: int = 0
    tier: Tier = Tier.COLD
    """What was asked for. A worker's own eviction does not change it: a request brings the model back."""
    spec: Hashable = None
    """What to load; the hub only compares it. None: forgotten, the entry stands for its generation alone."""
    residency: Residency = field(default_factory=Residency)

    state: ModelState = ModelState.COLD
    attempt: int = 0
    """Number of the operation under way, or of the last one; what an older one reports is void."""
    is_busy: bool = False
    """An operation is under way."""
    loaded_spec: Hashable = None
    """What the copy in memory was loaded from; None: there is none."""
    footprint: Footprint | None = None
    """None: not known yet."""
    kv_bytes: int = 0
    """Committed now, at least the floor while loaded or loading."""
    num_in_flight: int = 0
    """Requests its engine has."""
    num_held: int = 0
    """Requests that wait for it to come up."""
    held_since_s: float = 0.0
    """Since when the oldest of them waits."""
    last_used_s: float = 0.0
    ready_since_s: float = 0.0
    state_since_s: float = 0.0
    load_s: float = 0.0
    """How long its last load took, from host or image; 0: never loaded here."""
    num_failures: int = 0
    """Failed loads in a row."""
    retry_at_s: float = 0.0
    """A failed model is not tried again before, and from then on at the next reason to."""
    error: str = ""
    """Why it failed."""
    last_eviction: str = ""
    """Why it last left by the hub's own decision."""
    last_eviction_s: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether anything is known to load under this name."""
        return self.spec is not None
