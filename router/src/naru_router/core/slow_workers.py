"""Which workers are far slower than their peers for long: requests go elsewhere until one shows that it is over.

A machine with a bad fan or a noisy neighbour answers every request, only late: no breaker sees it, and a queue that is
counted in tokens looks short. The fleet tells of each first token and of the decode steps that workers report, asks for
the suspects about once a second, and routes by them. Time is passed in.

A worker's figure is the larger of two, each relative to its peers, so that what slows all of them, or is estimated
wrongly for all of them, makes none suspect:

    first tokens: median of (measured + grace) ÷ (expected + grace) over its last ones ÷ median of its peers' medians
    decode steps: for a model: its step ÷ median of its peers' steps for that model

Above `ratio` for `patience_s` it becomes suspect, the slowest first, and never more than half of them: somebody must
serve, and where most are slow, slow is what the fleet is. It comes back as after faults: pauses that double, then one
request that tries it; if its first token and the steps told since are below `ratio`, the worker is sound again.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from naru_router.core.breaker import Breaker, BreakerSettings, Circuit


@dataclass(frozen=True, slots=True)
class SlownessSettings:
    """What slow is."""

    ratio: float = 3.0
    patience_s: float = 10.0
    min_samples: int = 5
    """First tokens that a worker has to have given lately."""
    max_age_s: float = 60.0
    """Older ones say nothing about now."""
    grace_s: float = 0.05
    """Added to both times: milliseconds vary by more than any ratio."""
    circuit: BreakerSettings = field(default_factory=lambda: BreakerSettings(min_pause_s=10.0, max_pause_s=120.0))


_MAX_SAMPLES = 32
DEFAULTS = SlownessSettings()


class _Figures:
    """What is known of one worker."""

    def __init__(self, settings: SlownessSettings) -> None:
        self.ratios: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)
        """(when, measured by expected)."""
        self.steps: dict[str, tuple[float, float]] = {}
        """Model to (when, seconds)."""
        self.slow_since_s: float | None = None
        self.breaker = Breaker(settings.circuit)
        self.probe_term: int | None = None

    def forget_steps_before(self, oldest_s: float) -> None:
        """Steps of models that are told no more."""
        if any(at_s < oldest_s for at_s, _ in self.steps.values()):
            self.steps = {model: step for model, step in self.steps.items() if step[0] >= oldest_s}


class SlowWorkers:
    """Figures of all workers of one router, by any id that tells their lives apart. Mutable."""

    def __init__(self, settings: SlownessSettings = DEFAULTS) -> None:
        self._settings = settings
        self._workers: dict[str, _Figures] = {}

    def sent(self, worker_id: str, now_s: float) -> int:
        """Notes that a request goes to the worker; the number is to be told with its first token, or its end."""
        figures = self._of(worker_id)
        term = figures.breaker.sent(now_s)
        if figures.breaker.circuit(now_s) is Circuit.PROBING and figures.probe_term != term:
            figures.probe_term = term
            figures.steps.clear()  # what it told before says nothing about now
        return term

    def first_token(self, worker_id: str, term: int, measured_s: float, expected_s: float, now_s: float) -> None:
        """A request has got its first token.

        Args:
            worker_id: where.
            term: as `sent` gave it.
            measured_s: from sending to the first token.
            expected_s: as the decision said; requests that waited for their model's load are not to be told.
            now_s: of any clock that does not go back.
        """
        if not (0.0 <= measured_s < math.inf and 0.0 <= expected_s < math.inf):
            return
        grace_s = self._settings.grace_s
        ratio = (measured_s + grace_s) / (expected_s + grace_s)
        figures = self._workers.get(worker_id)
        if figures is None:
            return  # forgotten meanwhile
        if figures.breaker.circuit(now_s) is Circuit.PROBING:
            self._judge_probe(worker_id, term, ratio, now_s)
        if figures.breaker.circuit(now_s) is Circuit.CLOSED:
            figures.ratios.append((now_s, ratio))

    def ended_without(self, worker_id: str, term: int, now_s: float) -> None:
        """A request has ended without a first token; faults are for the breaker to count."""
        figures = self._workers.get(worker_id)
        if figures is not None:
            figures.breaker.abandoned(term, now_s)

    def decode_step(self, worker_id: str, model: str, step_s: float, now_s: float) -> None:
        """A worker has told how long a step of a model takes; 0: not known."""
        if 0.0 < step_s < math.inf:
            self._of(worker_id).steps[model] = (now_s, step_s)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._workers.pop(worker_id, None)

    def circuit(self, worker_id: str, now_s: float) -> Circuit:
        """Open, half open or probing: suspect as slow."""
        figures = self._workers.get(worker_id)
        return figures.breaker.circuit(now_s) if figures is not None else Circuit.CLOSED

    def review(self, now_s: float) -> dict[str, str]:
        """Looks at all workers; those that have just become suspect, and why."""
        settings, board = self._settings, self._board(now_s)
        found: dict[str, str] = {}
        slow = []
        for worker_id, figures in self._workers.items():
            figures.forget_steps_before(now_s - settings.max_age_s)
            if figures.breaker.circuit(now_s) is not Circuit.CLOSED:
                continue
            figure, why = max(board.by_ratio(worker_id), board.by_steps(worker_id))
            if figure < settings.ratio:
                figures.slow_since_s = None
                continue
            if figures.slow_since_s is None:
                figures.slow_since_s = now_s
            if now_s - figures.slow_since_s >= settings.patience_s:
                slow.append((-figure, worker_id, why))
        num_suspect = sum(figures.breaker.circuit(now_s) is not Circuit.CLOSED for figures in self._workers.values())
        for _, worker_id, why in sorted(slow)[: max(0, len(self._workers) // 2 - num_suspect)]:
            figures = self._workers[worker_id]
            figures.breaker.trip(now_s, why)
            figures.ratios.clear()
            figures.slow_since_s = None
            found[worker_id] = why
        return found

    def _of(self, worker_id: str) -> _Figures:
        figures = self._workers.get(worker_id)
        if figures is None:
            figures = self._workers[worker_id] = _Figures(self._settings)
        return figures

    def _judge_probe(self, worker_id: str, term: int, ratio: float, now_s: float) -> None:
        board = self._board(now_s)
        board.ratios[worker_id] = ratio
        for model, (_, step_s) in self._workers[worker_id].steps.items():
            board.steps.setdefault(model, {})[worker_id] = step_s
        figure, why = max(board.by_ratio(worker_id), board.by_steps(worker_id))
        breaker = self._workers[worker_id].breaker
        if figure < self._settings.ratio:
            breaker.succeeded(term)
        else:
            breaker.failed(term, now_s, why)

    def _board(self, now_s: float) -> _Board:
        """The figures of this instant of those that are no suspects."""
        settings, board = self._settings, _Board()
        for worker_id, figures in self._workers.items():
            if figures.breaker.circuit(now_s) is not Circuit.CLOSED:
                continue
            ratios = [ratio for at_s, ratio in figures.ratios if now_s - at_s <= settings.max_age_s]
            if len(ratios) >= settings.min_samples:
                board.ratios[worker_id] = statistics.median(ratios)
            for model, (at_s, step_s) in figures.steps.items():
                if now_s - at_s <= settings.max_age_s:
                    board.steps.setdefault(model, {})[worker_id] = step_s
        return board


class _Board:
    """Workers side by side."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self.steps: dict[str, dict[str, float]] = {}
        """Model to worker to seconds."""

    def by_ratio(self, worker_id: str) -> tuple[float, str]:
        """How many times as slow as its peers its first tokens come, in words as well; 0: too little is known."""
        figure = _beside_peers(self.ratios, worker_id)
        return figure, f"its first tokens take {figure:.2g} times as long as its peers'"

    def by_steps(self, worker_id: str) -> tuple[float, str]:
        """The same of its decode steps, for the model where it is slowest."""
        figure, model = max(
            ((_beside_peers(by_worker, worker_id), m) for m, by_worker in self.steps.items()), default=(0.0, "")
        )
        return figure, f"its decode steps of {model!r} take {figure:.2g} times as long as its peers'"


def _beside_peers(values: dict[str, float], worker_id: str) -> float:
    """A worker's value by the median of the others'; 0: it has none, or they have none."""
    own = values.get(worker_id)
    peers = [value for each, value in values.items() if each != worker_id]
    return own / statistics.median(peers) if own is not None and peers else 0.0
