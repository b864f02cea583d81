"""What the hub is told: commands from outside, requests that come and go, and results of what it had done.

Every result names the attempt it belongs to; the hub ignores results of attempts it has given up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from naru_worker.core.hub.model import PLAIN, Footprint, Residency, Tier

# --- commands: refused when they are older than what was seen --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody wants a model at a tier."""

    model: str
    generation: int
    spec: Hashable
    tier: Tier = Tier.ACTIVE
    fencing_token: int = 0
    """Of the asker's lease; 0: it holds none, and only the generation counts."""
    residency: Residency = PLAIN
    for_request: bool = False
    """Somebody waits for it: it overtakes loads that nobody waits for."""


@dataclass(frozen=True, slots=True)
class Release:
    """Somebody wants a model down."""

    model: str
    generation: int
    fencing_token: int = 0
    tier: Tier | None = None
    """HOST or COLD keep it known; None forgets it."""
    drain_timeout_s: float = 0.0
    """Running requests may finish for this long."""


@dataclass(frozen=True, slots=True)
class Move:
    """Somebody wants a known model nearer or farther, by the orders there are for it: those stay as they are."""

    model: str
    tier: Tier
    fencing_token: int = 0
    only_if_idle: bool = False
    """A move down is refused while it has requests, waiting ones included."""
    drain_timeout_s: float = 0.0
    """A move down: running requests may finish for this long."""
    for_request: bool = False
    """As in Ask."""


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request for a known model. It is held while the model is not serving."""

    model: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over. `was_held`: it had not reached the engine."""

    model: str
    was_held: bool = False


# --- results of actions ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files are here and packed into an image; nothing of it is in memory."""

    model: str
    attempt: int
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class HostReached:
    """The image is in host memory."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The load could not book its bytes: KV caches have grown since the decision. Nothing was loaded."""

    model: str
    attempt: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine has it; held requests may go."""

    model: str
    attempt: int
    load_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A fetch, host or load operation failed; what it held has been given back, or is reported as unreturned."""

    model: str
    attempt: int
    error: str
    is_permanent: bool = False
    """Trying again cannot help until the model or the worker changes."""
    unreturned_bytes: int = 0
    is_in_host: bool = False
    """A load's: the weights that were in host memory are there still."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The operation that was told to stop is over, and holds nothing."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Drained:
    """No request of the model is left in its engine."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The engine has let go. `unreturned_bytes`: measured to be still held; they stay booked."""

    model: str
    attempt: int
    unreturned_bytes: int = 0
    error: str = ""
    """What went wrong where bytes were not returned."""
    not_kept: str = ""
    """Why the weights are not in host memory though they were to be kept there; empty: they are."""


@dataclass(frozen=True, slots=True)
class HostDropped:
    """The image has left host memory."""

    model: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KVChanged:
    """Committed KV bytes of loaded models (all that changed since the last one)."""

    kv_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BytesReturned:
    """Bytes that an unload had not returned have been seen to be free after all."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Result = (
    RequestArrived
    | RequestEnded
    | Fetched
    | HostReached
    | NoRoom
    | Loaded
    | Failed
    | Stopped
    | Drained
    | Unloaded
    | HostDropped
    | KVChanged
    | BytesReturned
    | Tick
)
"""What `Hub.handle` takes; commands have methods of their own, as they can be refused."""
