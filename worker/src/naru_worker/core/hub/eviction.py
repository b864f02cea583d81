"""Which models leave for a load that needs room. A pure choice over candidates; who is a candidate the hub decides.

The order of value: models that are the last copy of something stay longest, and among equals the score
bytes freed / (reload seconds x priority x popularity) says who is missed least for what it gives. Popularity counts
requests, old ones less: it is frequency and recency in one, and plain LRU for equal models that were asked for once.

Source: the greedy-dual family, with decay in place of its clock (Cherkasova 1998, "Improving WWW proxies performance
with Greedy-Dual-Size-Frequency caching policy"; Lee et al. 2001, "LRFU").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MIN_RELOAD_S = 1e-6
"""A model whose load was not measured, or took no time, still has a finite score."""
_MIN_POPULARITY = 1e-9
"""A model nobody asked for yet was asked for by somebody who expects requests."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A loaded model that may be evicted."""

    name: str
    idle_s: float
    """Seconds since its last request, at least 0."""
    freed_bytes: int
    """What its leaving gives back at once; 0 where others share its weights and it holds nothing else."""
    reload_s: float
    """What bringing it back will take."""
    priority: int
    """In [1, 1000]; 100 is normal, 200 twice as hard to evict."""
    is_last_copy: bool
    uses: int = 0
    """Requests served since it is known; only policies to compare with read it."""
    popularity: float = 1.0
    """Requests, old ones counting less: half as much after each half-life."""

    @property
    def score(self) -> float:
        """How little it is missed for what it gives; the highest leaves first."""
        cost = max(self.reload_s, _MIN_RELOAD_S) * self.priority / 100 * max(self.popularity, _MIN_POPULARITY)
        return self.freed_bytes / cost


@dataclass(frozen=True, slots=True)
class Victims:
    """Who leaves, in the order in which they go."""

    names: tuple[str, ...]
    freed_bytes: int
    reason: str


VictimChooser = Callable[[Sequence[Candidate], int], Victims | None]
"""(candidates, deficit in bytes) -> victims that cover it, or None where all together do not."""


def choose_victims(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
    """The smallest sufficient set in the order of value: without any one of the victims the deficit is not covered.

    None: all together do not cover it, or there is no deficit.
    """
    if deficit_bytes <= 0:
        return None
    taken: list[Candidate] = []
    freed_bytes = 0
    for candidate in sorted(candidates, key=_value):
        if freed_bytes >= deficit_bytes:
            break
        if candidate.freed_bytes > 0:
            taken.append(candidate)
            freed_bytes += candidate.freed_bytes
    if freed_bytes < deficit_bytes:
        return None
    for candidate in reversed(tuple(taken)):
        if freed_bytes - candidate.freed_bytes >= deficit_bytes:
            taken.remove(candidate)
            freed_bytes -= candidate.freed_bytes
    return Victims(tuple(victim.name for victim in taken), freed_bytes, _reason(taken, freed_bytes, deficit_bytes))


def describe_bytes(num_bytes: int) -> str:
    """Bytes for people: '104 MB', '1.5 GB', '12 bytes'."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(num_bytes) >= size:
            return (
                f"{num_bytes / size:.3g} {unit}" if abs(num_bytes) < 1000 * size else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes} bytes"


def describe_seconds(seconds: float) -> str:
    """Seconds for people: '12 s', '0.04 s'."""
    return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _value(candidate: Candidate) -> tuple[bool, float, float, str]:
    return candidate.is_last_copy, -candidate.score, -candidate.idle_s, candidate.name


def _reason(victims: Sequence[Candidate], freed_bytes: int, deficit_bytes: int) -> str:
    parts = ", ".join(
        f"{victim.name!r} (idle {describe_seconds(victim.idle_s)}, popularity {victim.popularity:.3g}, "
        f"{describe_bytes(victim.freed_bytes)}, "
        f"reload {describe_seconds(victim.reload_s)}{', last copy' if victim.is_last_copy else ''})"
        for victim in victims
    )
    return f"{describe_bytes(deficit_bytes)} are missing; {describe_bytes(freed_bytes)} come free by evicting {parts}"
