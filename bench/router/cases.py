"""What is measured of each router. Called by `bench.router`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.router.load import Chat, Shot, shoot
from bench.router.stand import Cores, Target

CONNECTIONS = 32
PLAIN = Chat(tokens=1)
"""The answer of one step: what is measured is the way there and back."""
STREAM = Chat(tokens=512, stream=True)
"""Long, so that a router which stalls once a stream is not measured by that alone."""
LONG_PLAIN = Chat(tokens=128)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured."""

    seconds: float
    """Of each shot."""
    rounds: int
    growth_requests: int
    """Over which memory is watched; 0: it is not."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one router, medians over rounds; requests and tokens in a second."""

    plain_per_s: float
    stream_tokens_per_s: float
    long_plain_tokens_per_s: float
    """Of answers of 128 tokens that are not streamed."""
    one_p50_s: float
    """Of plain chats on one connection; see also `added_p50_s` in the results."""
    half_peak_p99_s: float
    """Of plain chats that come at random, half as many as at most."""
    first_token_p50_s: float
    """Of the streams."""
    cpu_per_plain_s: float
    """Processor time of the router for a plain chat; 0: not known."""
    cpu_per_token_s: float
    rss_growth_bytes: int | None
    """From the first quarter of the plain chats to the last one; None: not watched."""
    rss_bytes: int
    shots: dict[str, list[dict[str, float]]]


def measure(load: Path, cores: Cores, targets: Sequence[Target], effort: Effort) -> dict[str, Figures]:
    """All figures of all routers, by name. They take turns in each round, so that what else the machine does meets all.

    Raises:
        PartError: an answer was wrong.
    """
    runs = [_Run(load, cores, target, effort) for target in targets]
    for run in runs:
        run.shoot("warm up", PLAIN, seconds=min(1.0, effort.seconds))
    for _ in range(effort.rounds):
        for run in runs:
            run.shoot("plain", PLAIN)
            run.shoot("stream", STREAM)
            run.shoot("long plain", LONG_PLAIN)
            run.shoot("one", PLAIN, connections=1)
    for _ in range(effort.rounds):
        for run in runs:
            run.shoot("half peak", PLAIN, rate=run.median("plain", "requests_per_s") / 2)
    return {run.name: run.figures() for run in runs}


class _Run:
    """The shots at one router."""

    def __init__(self, load: Path, cores: Cores, target: Target, effort: Effort) -> None:
        self._load = load
        self._cores = cores
        self._target = target
        self._effort = effort
        self.shots: dict[str, list[Shot]] = {}
        self._cpu_s: dict[str, float] = {}

    @property
    def name(self) -> str:
        return self._target.name

    def figures(self) -> Figures:
        growth = self.growth() if self.name == "naru" else None
        return Figures(
            plain_per_s=self.median("plain", "requests_per_s"),
            stream_tokens_per_s=self.median("stream", "tokens_per_s"),
            long_plain_tokens_per_s=self.median("long plain", "tokens_per_s"),
            one_p50_s=self.median("one", "p50_s"),
            half_peak_p99_s=self.median("half peak", "p99_s"),
            first_token_p50_s=self.median("stream", "first_p50_s"),
            cpu_per_plain_s=self.cpu_per("plain", "requests"),
            cpu_per_token_s=self.cpu_per("stream", "tokens"),
            rss_growth_bytes=growth,
            rss_bytes=self._target.rss_bytes() if self._target.process is not None else 0,
            shots={name: [dataclasses.asdict(shot) for shot in shots] for name, shots in self.shots.items()},
        )

    def shoot(
        self,
        name: str,
        chat: Chat,
        *,
        connections: int = CONNECTIONS,
        rate: float = 0.0,
        seconds: float = 0.0,
        requests: int = 0,
    ) -> Shot:
        before_s = self._target.cpu_s()
        shot = shoot(
            self._load,
            self._cores,
            self._target.port,
            chat,
            connections=connections,
            rate=rate,
            seconds=0.0 if requests else seconds or self._effort.seconds,
            requests=requests,
        )
        self._cpu_s[name] = self._cpu_s.get(name, 0.0) + self._target.cpu_s() - before_s
        self.shots.setdefault(name, []).append(shot)
        return shot

    def median(self, name: str, figure: str) -> float:
        values = sorted(float(getattr(shot, figure)) for shot in self.shots[name])
        return values[len(values) // 2]

    def cpu_per(self, name: str, what: str) -> float:
        return self._cpu_s[name] / sum(int(getattr(shot, what)) for shot in self.shots[name])

    def growth(self) -> int | None:
        """Growth of memory over many requests, after a quarter of them."""
        count = self._effort.growth_requests
        if not count or self._target.process is None:
            return None
        self.shoot("growth", PLAIN, requests=max(1, count // 4))
        before = self._target.rss_bytes()
        self.shoot("growth", PLAIN, requests=max(1, count - count // 4))
        return self._target.rss_bytes() - before
