"""How workers do, by how this router's requests end there: circuits, slowness, and how long requests wait for a turn.

The fleet asks it for each view of a worker; the dispatcher tells it of each request that it sends. The judging is in
core.breaker, core.slow_workers and core.start_meter: this holds one of each for every worker and model, with the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Set
from dataclasses import dataclass

from naru_router.adapters.metrics import Metrics
from naru_router.core.breaker import Breaker, Circuit, is_fault
from naru_router.core.retry import AttemptFailed, FailureKind
from naru_router.core.slow_workers import SlowWorkers
from naru_router.core.start_meter import StartMeter

logger = logging.getLogger(__name__)

REVIEW_INTERVAL_S = 1.0
TIDY_INTERVAL_S = 60.0
"""Between two looks for models that are gone."""
Incarnation = tuple[str, str]
"""(worker id, epoch): a restarted worker is another one."""
_Pair = tuple[Incarnation, str]


@dataclass(frozen=True, slots=True)
class Condition:
    """What routing is to make of a worker for a model."""

    is_suspect: bool = False
    is_probe: bool = False
    observed_wait_s: float = 0.0


SOUND = Condition()


class Health:
    """All workers and models of one router. One event loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._metrics = metrics
        self._breakers: dict[_Pair, Breaker] = {}
        """Of the pairs that had a fault."""
        self._meters: dict[_Pair, StartMeter] = {}
        self._slow = SlowWorkers()
        self._suspects: set[str] = set()
        """Those that were slow at the last review or became so in it; all others are sound by their speed."""
        self._seen: set[Incarnation] = set()
        """Living ones of which something is kept."""
        self._reviewed_s = self._tidied_s = clock()

    def condition(self, incarnation: Incarnation, model: str, now_s: float) -> Condition:
        """Of a worker for a model, at an instant of the clock."""
        pair = (incarnation, model)
        meter = self._meters.get(pair)
        wait_s = 0.0 if meter is None or not meter.num_waiting else meter.wait_s
        if not self._breakers and not self._suspects:
            return Condition(observed_wait_s=wait_s) if wait_s else SOUND
        circuits = []
        if (text := _text(incarnation)) in self._suspects:
            circuits.append(self._slow.circuit(text, now_s))
        if (breaker := self._breakers.get(pair)) is not None:
            circuits.append(breaker.circuit(now_s))
        if all(circuit is Circuit.CLOSED for circuit in circuits):
            return Condition(observed_wait_s=wait_s) if wait_s else SOUND
        # Where one says that it may be tried and the other that it is left alone, it is left alone.
        may_try = all(circuit in (Circuit.CLOSED, Circuit.HALF_OPEN) for circuit in circuits)
        return Condition(is_suspect=not may_try, is_probe=may_try, observed_wait_s=wait_s)

    def sent(self, incarnation: Incarnation, model: str, uncached_tokens: int, expected_s: float | None) -> Sending:
        """A request goes to a worker; what comes of it is to be told to what this returns.

        Args:
            incarnation: where.
            model: for which.
            uncached_tokens: as expected.
            expected_s: to its first output; None: it waits for the model's load, which says nothing of the worker.
        """
        return Sending(self, incarnation, model, uncached_tokens, expected_s)

    def told_steps(self, incarnation: Incarnation, steps_s: Iterable[tuple[str, float]]) -> None:
        """A living worker has told how long the decode steps of models take."""
        now_s, text = self.clock(), _text(incarnation)
        self._seen.add(incarnation)
        for model, step_s in steps_s:
            self._slow.decode_step(text, model, step_s, now_s)

    def review(self) -> None:
        """Looks for workers that are slow; at most once a second, however often it is called."""
        now_s = self.clock()
        if now_s - self._reviewed_s < REVIEW_INTERVAL_S:
            return
        self._reviewed_s = now_s
        found = self._slow.review(now_s)
        self._suspects = {text for text in self._suspects if self._slow.circuit(text, now_s) is not Circuit.CLOSED}
        self._suspects |= found.keys()
        for text, why in found.items():
            worker_id = text.partition("\n")[0]
            logger.warning("worker %s is asked only where no other can be: %s", worker_id, why)
            self._metrics.circuits_opened.labels(worker_id).inc()

    def keep(self, living: Set[Incarnation], models: Container[str]) -> None:
        """Forgets the workers that are gone at once, and the models that are gone sometimes."""
        now_s, gone = self.clock(), self._seen - living
        if gone or now_s - self._tidied_s >= TIDY_INTERVAL_S:
            self._tidied_s = now_s
            self._breakers = {
                pair: it for pair, it in self._breakers.items() if pair[0] in living and pair[1] in models
            }
            self._meters = {pair: it for pair, it in self._meters.items() if pair[0] in living and pair[1] in models}
        for incarnation in gone:
            text = _text(incarnation)
            self._slow.forget(text)
            self._suspects.discard(text)
        self._seen -= gone


class Sending:
    """One request on one worker. Told of its first output once at most, and of its end once."""

    __slots__ = (
        "_expected_s",
        "_has_begun",
        "_health",
        "_is_over",
        "_meter",
        "_pair",
        "_slow_term",
        "_term",
        "_text",
        "_tokens",
        "sent_s",
    )

    def __init__(
        self, health: Health, incarnation: Incarnation, model: str, uncached_tokens: int, expected_s: float | None
    ) -> None:
        self._health = health
        self._pair = pair = (incarnation, model)
        self._tokens = uncached_tokens
        self._expected_s = expected_s
        self.sent_s = now_s = health.clock()
        """On the clock of health."""
        self._has_begun = self._is_over = False
        self._term = self._slow_term = 0
        self._meter: StartMeter | None = None
        if expected_s is None:
            return  # nor does it try a worker that was left alone: how it ends says nothing
        health._seen.add(incarnation)
        self._text = _text(incarnation)
        breaker = health._breakers.get(pair)
        if breaker is not None:
            self._term = breaker.sent(now_s)
        self._slow_term = health._slow.sent(self._text, now_s)
        self._meter = health._meters.get(pair)
        if self._meter is None:
            self._meter = health._meters[pair] = StartMeter()
        self._meter.sent(uncached_tokens, now_s)

    def first_output(self) -> float:
        """Its first output is here; seconds since it was sent."""
        health, expected_s = self._health, self._expected_s
        now_s = health.clock()
        self._has_begun = True
        took_s = now_s - self.sent_s
        if self._meter is None or expected_s is None:
            return took_s
        breaker = health._breakers.get(self._pair)
        if breaker is not None:
            breaker.succeeded(self._term)
        self._meter.started(self._tokens, now_s)
        if expected_s > 0:
            health._slow.first_token(self._text, self._slow_term, took_s, expected_s, now_s)
        else:
            health._slow.ended_without(self._text, self._slow_term, now_s)  # there is nothing to measure it by
        return took_s

    def failed(self, failed: AttemptFailed, life: object) -> None:
        """It has failed; `life` of the stream on which it was."""
        health, incarnation = self._health, self._pair[0]
        if self._expected_s is None or not is_fault(failed) or incarnation not in health._seen:
            return
        now_s = health.clock()
        breaker = health._breakers.get(self._pair)
        if breaker is None:
            breaker = health._breakers[self._pair] = Breaker()
        was_closed = breaker.circuit(now_s) is Circuit.CLOSED
        incident = life if failed.kind is FailureKind.STREAM_LOST else None
        breaker.failed(self._term, now_s, failed.error.message, incident)
        if was_closed and breaker.circuit(now_s) is not Circuit.CLOSED:
            logger.warning("worker %s is left alone for a while: %s", incarnation[0], breaker.reason)
            health._metrics.circuits_opened.labels(incarnation[0]).inc()

    def ended(self) -> None:
        """It is over, whatever came of it; again: nothing."""
        if self._is_over:
            return
        self._is_over = True
        if self._has_begun or self._meter is None:
            return
        health = self._health
        now_s = health.clock()
        breaker = health._breakers.get(self._pair)
        if breaker is not None:
            breaker.abandoned(self._term, now_s)
        health._slow.ended_without(self._text, self._slow_term, now_s)
        self._meter.ended(self._tokens, now_s)


def _text(incarnation: Incarnation) -> str:
    return "\n".join(incarnation)
