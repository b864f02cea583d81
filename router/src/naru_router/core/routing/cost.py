"""What a request would cost on each worker, in seconds: until its first token, and what others lose by it.

Used by `route` to compare workers and by `admit` to know whether waiting makes sense. It chooses nothing.

    expected = wait + own + steps
        wait  = waiting tokens ÷ rate      prompts ahead of it
        own   = uncached tokens ÷ rate     its own prompt, less what the prefix cache has
        steps = (waiting + uncached) tokens ÷ tokens of a step × decode step
                                           each step that computes a chunk also decodes for those that answer already
    cost = expected + own × (work + stall × requests that decode)

The second part of the cost is not the request's own. `stall`: every request that decodes there pauses while this prompt
is computed; a second of pause in an answer that is being read weighs a tenth of a second before an answer. `work`: what
is computed a second time is missing for those that come later, most of all when the fleet is busy, so a second of work
counts more than a second of waiting. In simulations of documents that are asked about several times, the two together
cut the mean time to first token by a third beyond capacity, and change it by less than 3 % below.

Numbers come from workers, so each is checked: what is not a positive finite number is not known. Unknown rates are the
mean of the known ones of this model, else a neutral value: workers are then still ordered by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from naru_router.core.routing.model import RouteRequest, WorkerView

NEUTRAL_TOKENS_PER_S = 1000.0
NEUTRAL_STEP_S = 0.02
NEUTRAL_TOKENS = 256
"""Of a prompt of unknown length."""
STEP_TOKENS = 256
"""Of a prompt that are computed in one step: the worker's default budget."""
STALL_WEIGHT = 0.1
WORK_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """One worker for one request."""

    view: WorkerView
    cost_s: float
    wait_s: float
    """Until its own prompt's turn."""
    own_s: float
    """Computing its own prompt."""
    steps_s: float
    """What both take longer beside requests that decode."""
    cached_tokens: int
    uncached_tokens: int

    @property
    def steps_ahead_s(self) -> float:
        """The part of `steps_s` that belongs to `wait_s`."""
        return self.steps_s * self.wait_s / (self.wait_s + self.own_s)

    @property
    def expected_s(self) -> float:
        """Until the first token."""
        return self.wait_s + self.own_s + self.steps_s


@dataclass(frozen=True, slots=True)
class Costs:
    """All workers for one request, column by column, as this is made for each request over all workers."""

    views: Sequence[WorkerView]
    costs_s: list[float]
    cached_tokens: list[int]
    num_tokens: int
    """Of the prompt; at least 1."""
    mean_rate: float
    """Prefill tokens a second: the mean of the known ones, else a neutral value."""
    is_measured: bool
    """Some worker has told its rate."""
    rates: list[float]
    steps_s: list[float]

    def at(self, index: int) -> Estimate:
        """One worker in full."""
        view, rate, cached = self.views[index], self.rates[index], self.cached_tokens[index]
        wait_s, own_s = max(0, view.waiting_tokens) / rate, (self.num_tokens - cached) / rate
        steps_s = (wait_s + own_s) * rate / STEP_TOKENS * self.steps_s[index] if _num_decoding(view) else 0.0
        return Estimate(view, self.costs_s[index], wait_s, own_s, steps_s, cached, self.num_tokens - cached)


def compare(views: Sequence[WorkerView], request: RouteRequest) -> Costs:
    """What the request would cost on each worker, in their order."""
    rates, mean_rate, is_measured = _filled([view.prefill_tokens_per_s for view in views], NEUTRAL_TOKENS_PER_S)
    steps_s, _, _ = _filled([view.decode_step_s for view in views], NEUTRAL_STEP_S)
    num_tokens = request.num_tokens
    if num_tokens <= 0:
        num_tokens = request.key_tokens[-1] if request.key_tokens else NEUTRAL_TOKENS
    cached_tokens = _cached_tokens(views, request, num_tokens)
    waiting = [view.waiting_tokens for view in views]
    if min(waiting) < 0:
        waiting = [max(0, tokens) for tokens in waiting]
    decoding = [view.num_in_flight_all or view.num_in_flight for view in views]
    columns = zip(rates, cached_tokens, waiting, decoding, steps_s, strict=True)
    if any(decoding):
        costs_s = [
            (ahead + (num_tokens - cached) * (1.0 + WORK_WEIGHT + STALL_WEIGHT * num_decoding)) / rate
            + (num_decoding > 0) * (ahead + num_tokens - cached) * step_s / STEP_TOKENS
            for rate, cached, ahead, num_decoding, step_s in columns
        ]
    else:
        costs_s = [
            (ahead + (num_tokens - cached) * (1.0 + WORK_WEIGHT)) / rate for rate, cached, ahead, _, _ in columns
        ]
    return Costs(views, costs_s, cached_tokens, num_tokens, mean_rate, is_measured, rates, steps_s)


def alone(view: WorkerView, request: RouteRequest) -> Estimate:
    """What the only worker there is would cost: as `compare` says, in less time. Most models have one copy."""
    rate = view.prefill_tokens_per_s
    if not 0.0 < rate < math.inf:
        rate = NEUTRAL_TOKENS_PER_S
    step_s = view.decode_step_s
    if not 0.0 < step_s < math.inf:
        step_s = NEUTRAL_STEP_S
    num_tokens = request.num_tokens
    if num_tokens <= 0:
        num_tokens = request.key_tokens[-1] if request.key_tokens else NEUTRAL_TOKENS
    [cached] = _cached_tokens((view,), request, num_tokens) if request.key_tokens else (0,)
    ahead, uncached, num_decoding = max(0, view.waiting_tokens), num_tokens - cached, _num_decoding(view)
    wait_s, own_s = ahead / rate, uncached / rate
    steps_s = (wait_s + own_s) * rate / STEP_TOKENS * step_s if num_decoding else 0.0
    cost_s = (ahead + uncached * (1.0 + WORK_WEIGHT + STALL_WEIGHT * num_decoding)) / rate
    if num_decoding > 0:
        cost_s += (ahead + uncached) * step_s / STEP_TOKENS
    return Estimate(view, cost_s, wait_s, own_s, steps_s, cached, uncached)


def _num_decoding(view: WorkerView) -> int:
    """At most so many: those that wait are among them. A view may leave out the number of all."""
    return view.num_in_flight_all or view.num_in_flight


def _cached_tokens(views: Sequence[WorkerView], request: RouteRequest, num_tokens: int) -> list[int]:
    key_tokens, by_worker = request.key_tokens, request.cached_keys
    if not key_tokens:
        return [0] * len(views)
    if by_worker is None:
        counts = [view.num_cached_keys for view in views]
    elif by_worker:
        counts = [by_worker.get(view.worker_id, 0) for view in views]
    else:
        return [0] * len(views)
    last = len(key_tokens)
    cached = [key_tokens[(count if count < last else last) - 1] if count > 0 else 0 for count in counts]
    if max(cached) < num_tokens:
        return cached
    # The last token is always computed: the first one of the answer comes of it.
    return [min(tokens, num_tokens - 1) for tokens in cached]


def _filled(numbers: list[float], neutral: float) -> tuple[list[float], float, bool]:
    """The numbers with a value for each unknown one, that value, and whether any was known."""
    total = sum(numbers)
    if 0.0 < total < math.inf and min(numbers) > 0.0:
        return numbers, total / len(numbers), True
    known = [number for number in numbers if 0.0 < number < math.inf]
    mean = sum(known) / len(known) if known else neutral
    if not 0.0 < mean < math.inf:
        return [neutral] * len(numbers), neutral, False
    return [number if 0.0 < number < math.inf else mean for number in numbers], mean, bool(known)
