"""What routing knows and what it says: snapshots of workers, the request, and the decision with its reasons.

The fleet makes the snapshot, the dispatcher carries the decision out. Nothing here reads a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Strategy(enum.Enum):
    """How requests choose among the copies of a model."""

    PREFIX_AFFINITY = "prefix_affinity"
    """Soonest done: what is cached, what waits, how fast the worker is."""
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that has the model ready, at this instant. Numbers are of this model on it, unless said otherwise."""

    worker_id: str
    num_in_flight: int = 0
    """This router's open requests, and those of other routers as the worker last told."""
    num_in_flight_all: int = 0
    """The same over all models: they share its processor."""
    waiting_tokens: int = 0
    """Prompt tokens that are neither cached nor computed yet: as last told, and of what was sent since."""
    prefill_tokens_per_s: float = 0.0
    """Measured; 0: not known."""
    decode_step_s: float = 0.0
    """Measured time of a step that decodes; 0: not known."""
    num_cached_keys: int = 0
    """Leading route keys of the request that its prefix cache holds; see also RouteRequest.cached_keys."""
    is_leaving: bool = False
    """It serves for a while yet: asked when no other can."""
    is_suspect: bool = False
    """Its circuit is open, or it is far slower than the others: asked when no other can."""
    is_probe: bool = False
    """Its circuit is half open: one request may try it."""
    observed_wait_s: float = 0.0
    """Seconds until a request would get its turn there, by how this router's own have got theirs (core.start_meter)."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What of a request decides its place."""

    ring_key: bytes
    """Equal for requests that belong together where nothing else is known: the prompt's beginning, or its session."""
    num_tokens: int = 0
    """Of the prompt, estimated; 0: not known."""
    key_tokens: tuple[int, ...] = ()
    """Estimated tokens up to the end of each route key; as long as the keys are."""
    strategy: Strategy = Strategy.PREFIX_AFFINITY
    load_factor: float = 1.25
    """c of bounded loads; at least 1."""
    num_virtual_nodes: int = 128
    seed: bytes = b""
    """Of the hash ring; the same in all routers of an installation."""
    turn: int = 0
    """Of round robin: the number of this request among this router's for the model."""
    may_probe: bool = True
    """Whether it may be the one that tries a worker whose circuit is half open: not one that has failed before."""
    cached_keys: Mapping[str, int] | None = None
    """Worker id to its `num_cached_keys`, 0 where absent; None: as the views say. So views can be kept from one request
    to the next.
    """


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker and why."""

    worker_id: str
    capacity: int
    """Most requests the worker may hold by bounded loads, this one included."""
    num_skipped: int
    """Workers nearer to the key, or better by time, that were full."""
    reasons: Sequence[str]
    expected_s: float = 0.0
    """Seconds to the first token, as expected; 0: not known."""
    expected_cached_tokens: int = 0
    scores_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by worker, of those that were compared: expected ones, and those that others would lose."""
