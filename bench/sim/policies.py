"""What the hub's choice of victims is compared with: other choosers, and what else sets such a policy apart.

Called by the comparison. Every policy runs in the same hub, on the same requests; each chooser is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from naru_worker.core.hub.eviction import Candidate, VictimChooser, Victims, choose_victims

IDLE_TTL_S = 300.0
"""Of the policy that only lets idle models go: the usual keep-alive of five minutes."""

NEVER_S = 1e9
"""Longer than any simulation."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to decide who leaves."""

    name: str
    choose: VictimChooser
    idle_ttl_s: float = 0.0
    """Without requests for so long a model leaves; 0: it stays."""
    min_residency_s: float = 0.0
    """After its load no other model evicts it for so long."""
    is_exclusive: bool = False
    """Every model takes the whole budget, whatever its size: one at a time."""


def choose_lru(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
    """Longest without a request first, until the deficit is covered. Size and reload cost do not count."""
    return _in_order(candidates, deficit_bytes, "longest unused", lambda model: (-model.idle_s, model.name))


def choose_lfu(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
    """Fewest requests since it is known first, then the longest unused."""
    return _in_order(candidates, deficit_bytes, "least used", lambda model: (model.uses, -model.idle_s, model.name))


def choose_nobody(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
    """Nobody leaves for another model: room comes from idle time alone."""
    return None


def _in_order(
    candidates: Sequence[Candidate],
    deficit_bytes: int,
    reason: str,
    key: Callable[[Candidate], tuple[float, str] | tuple[float, float, str]],
) -> Victims | None:
    if deficit_bytes <= 0:
        return None
    names: list[str] = []
    freed_bytes = 0
    for candidate in sorted(candidates, key=key):
        if candidate.freed_bytes > 0:
            names.append(candidate.name)
            freed_bytes += candidate.freed_bytes
        if freed_bytes >= deficit_bytes:
            return Victims(tuple(names), freed_bytes, reason)
    return None


POLICIES = (
    Policy("Naru", choose_victims),
    Policy("LRU", choose_lru),
    Policy("LFU", choose_lfu),
    Policy("idle only", choose_nobody, idle_ttl_s=IDLE_TTL_S, min_residency_s=NEVER_S),
    Policy("exclusive slot", choose_lru, is_exclusive=True),
)
