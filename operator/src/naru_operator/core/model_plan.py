"""Commands to workers about models, and what is seen of models there: the words that every plan is written in.

Used by the plan of one machine and by that of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from naru_operator.core.desired import DesiredModel, EngineLimits, Residency

Applied = tuple[DesiredModel | None, int]
"""A model as it was last planned, and its generation; None once it is gone. Generations of a name never fall."""

ABSENT = ("cold", "draining")
"""States in which a worker's model is gone, or as good as gone."""
KNOWN = "known"
"""Not held, and the worker has been told of it in this life, so that a request or a router's keeper can bring it up."""
EVICTED = "evicted"
"""Not held, though the worker was told to load it: it gave the memory to others. A request brings it back; loading it
again unasked would undo the worker's own decision.
"""
AT_REST = (KNOWN, EVICTED)
UP = ("fetching", "loading", "ready", "active")
"""States in which a copy serves or is on its way to."""


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """One model on one worker, as its lease says, or as a command under way will make it."""

    state: str
    """Lower-case ModelState, KNOWN or EVICTED."""
    generation: int


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A model to bring to a worker; what the worker holds under that name gives way."""

    worker_id: str
    model: str
    uri: str
    revision: str
    generation: int
    limits: EngineLimits
    residency: Residency = field(default_factory=Residency)
    credentials: str = ""
    """Name of the credentials of its source on the worker; empty: what the worker's environment offers."""
    is_spare: bool = False
    """Copies belong elsewhere: the worker is told for the case that one more is wanted."""


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """A model to take off a worker; the worker forgets it."""

    worker_id: str
    model: str
    generation: int
    drain_timeout_s: float
