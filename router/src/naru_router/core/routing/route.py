"""Which of the workers that have a model ready gets a request. Called by the dispatcher for each attempt.

Prefix affinity compares workers in seconds (core.routing.cost) and takes, in this order:

1. Workers that stay and are sound. Where there are none: those that leave, then those whose circuit is half open, then
   suspects. A half-open worker gets the next request that may try it, unless that would cost the request too much.
2. Of these, those within their bound: with m requests in flight on n of them, load + 1 <= ceil(c * (m + 1) / n). One
   always is. So a hot prefix spills over, and the copies that come of it share its load from then on. Counts of a few
   requests say little, though, and where rates are measured the seconds balance by themselves: there, SLACK_REQUESTS
   more are within the bound, which then only stops what is wrongly measured. In simulations of chats on slow machines,
   where a worker has a handful of requests, the bound alone takes conversations away from their prefixes so often that
   61 % of prompt tokens are found in a cache instead of 73 %, and the mean time to first token is two and a half times
   as long. Of 200 requests on four workers, the slack lets one have 1.42 times the mean where it would be 1.26.
3. Of these, those that cost hardly more than the cheapest. Hardly: a tenth, which is noise in what workers measure, and
   MARGIN_SHARE of the time to compute what no worker has cached. For that part the ring is the only knowledge there is:
   whoever sent the same beginning a moment ago, through any router, is at its home, where it is being computed now. To
   wait there saves the second computation; where the beginnings differ after all, the wait is lost. In simulations of
   multi-turn and shared documents a quarter costs prompts that share nothing 3 % of their mean time to first token, a
   half 7 %, the whole 12 %, while one router alone gains little by it, as it sees where its own prompts wait.
4. Of these, the one with the most cached, then the first one clockwise from the request's key on the ring. Few keys
   move when a worker comes or goes, routers that know the same choose the same, and idle ones do not all begin with the
   first name.

The order of 4 does not depend on load and 3 depends on the cheapest alone: a worker that gets slower or busier is never
chosen because of that. Affinity by thresholds (share of the prompt that matches, difference of queue lengths) switches
between two policies and herds at the switch; weights on normalized scores make an idle fleet's noise count as much as
a queue of minutes. Seconds need neither.

Pure: the same views and request give the same decision, whatever the order of the views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from naru_router.core.routing.cost import Costs, Estimate, alone, compare
from naru_router.core.routing.model import Decision, RouteRequest, Strategy, WorkerView
from naru_router.core.routing.reasons import Reasons
from naru_router.core.routing.ring import bound, nearest, seeded

MARGIN_SHARE = 0.25
SLACK_REQUESTS = 8
"""By which seconds may go above the bound where prefill rates are measured."""
NOISE_RATIO = 0.1
NOISE_S = 0.001
MAX_PROBE_COST_S = 2.0
"""Most that the request which tries a worker may lose by it, beside the risk that it fails."""

_HALF_OPEN = 2
_TIER_NAMES = ("", "leaving", "half open", "suspect", "suspect and leaving")


def route(views: Sequence[WorkerView], request: RouteRequest) -> Decision:
    """Picks one of at least one worker with distinct ids."""
    assert views, "the caller answers when nobody can serve"
    tier, able, probes = _eligible(views)
    if probes and request.may_probe:
        decision = _probe(able, probes, request)
        if decision is not None:
            return decision
    reasons = (f"only workers that are {_TIER_NAMES[tier]} can serve",) if tier else ()
    limit = _limit(able, request)
    if len(able) == 1 and request.strategy is Strategy.PREFIX_AFFINITY:
        return _only(able[0], request, limit, reasons)
    match request.strategy:
        case Strategy.ROUND_ROBIN:
            return _round_robin(able, request, limit, reasons)
        case Strategy.LEAST_LOADED:
            return _least_loaded(able, request, limit, reasons)
        case Strategy.PREFIX_AFFINITY:
            return _soonest(able, request, limit, reasons)


def _eligible(views: Sequence[WorkerView]) -> tuple[int, list[WorkerView], list[WorkerView]]:
    """The best tier there is, who is in it, and who may be tried instead."""
    able = [view for view in views if not (view.is_leaving or view.is_suspect or view.is_probe)]
    if len(able) == len(views):
        return 0, able, []
    tiers = [_tier(view) for view in views]
    best = min(tiers)
    able = [view for view, tier in zip(views, tiers, strict=True) if tier == best]
    probes = [view for view, tier in zip(views, tiers, strict=True) if tier == _HALF_OPEN > best]
    return best, able, probes


def _tier(view: WorkerView) -> int:
    is_sound = not (view.is_suspect or view.is_probe)
    if view.is_leaving:
        return 1 if is_sound else 4
    return 0 if is_sound else _HALF_OPEN if view.is_probe else 3


def _probe(able: list[WorkerView], probes: list[WorkerView], request: RouteRequest) -> Decision | None:
    """The half-open worker that the request tries; None: it goes where others go."""
    limit = _limit([*able, *probes], request)
    # One comparison, so that unknown rates are filled up alike.
    costs = compare([*able, *(view for view in probes if view.num_in_flight < limit)], request)
    best = min(
        range(len(able), len(costs.views)), key=lambda i: (costs.costs_s[i], costs.views[i].worker_id), default=-1
    )
    if best < 0 or costs.costs_s[best] > min(costs.costs_s[: len(able)]) + MAX_PROBE_COST_S:
        return None
    return _decision(costs.at(best), limit, ("tries it: its circuit is half open",), _scores(costs))


def _only(view: WorkerView, request: RouteRequest, limit: int, reasons: tuple[str, ...]) -> Decision:
    """The one there is. One worker is always within its bound."""
    found = alone(view, request)
    if 0.0 < view.prefill_tokens_per_s < math.inf:
        limit += SLACK_REQUESTS
    return _decision(found, limit, reasons, {view.worker_id: found.cost_s})


def _soonest(able: list[WorkerView], request: RouteRequest, limit: int, reasons: tuple[str, ...]) -> Decision:
    costs = compare(able, request)
    if costs.is_measured:
        limit += SLACK_REQUESTS
    is_all_free = max([view.num_in_flight for view in able]) < limit
    costs_s, cached = costs.costs_s, costs.cached_tokens
    free = range(len(able)) if is_all_free else [i for i, view in enumerate(able) if view.num_in_flight < limit]
    lowest_s = min(costs_s) if is_all_free else min([costs_s[i] for i in free])
    # At the common rate: were it the cheapest one's, a worker could be chosen because it became more expensive.
    # A prompt of unknown length would be given a margin that its like do not show as waiting tokens.
    margin_s = MARGIN_SHARE * max(0, request.num_tokens - max(cached)) / costs.mean_rate
    ceiling_s = lowest_s * (1.0 + NOISE_RATIO) + NOISE_S + margin_s
    near = [i for i in free if costs_s[i] <= ceiling_s]
    if any(cached):
        most_cached = max([cached[i] for i in near])
        near = [i for i in near if cached[i] == most_cached]
    chosen = _first_on_ring(able, near, request)
    num_skipped = (
        0 if is_all_free else sum(costs_s[i] < costs_s[chosen] for i in set(range(len(able))).difference(free))
    )
    how = len(near), ceiling_s, len(able), lowest_s
    return _decision(costs.at(chosen), limit, reasons, _scores(costs), num_skipped, how)


def _least_loaded(able: list[WorkerView], request: RouteRequest, limit: int, reasons: tuple[str, ...]) -> Decision:
    # The lowest load is never above the bound.
    loads = [(view.num_in_flight, view.num_in_flight_all) for view in able]
    fewest = min(loads)
    chosen = _first_on_ring(able, [i for i, load in enumerate(loads) if load == fewest], request)
    reasons = (*reasons, f"first on the ring of the {loads.count(fewest)} of {len(able)} with the fewest requests")
    costs = compare(able, request)
    return _decision(costs.at(chosen), limit, reasons, _scores(costs))


def _round_robin(able: list[WorkerView], request: RouteRequest, limit: int, reasons: tuple[str, ...]) -> Decision:
    place = request.turn % len(able)
    _, chosen = sorted((view.worker_id, i) for i, view in enumerate(able))[place]
    reasons = (*reasons, f"turn {request.turn}: number {place + 1} of {len(able)}")
    costs = compare(able, request)
    return _decision(costs.at(chosen), limit, reasons, _scores(costs))


def _limit(able: Sequence[WorkerView], request: RouteRequest) -> int:
    return bound(sum([view.num_in_flight for view in able]), len(able), request.load_factor)


def _first_on_ring(able: Sequence[WorkerView], indices: list[int], request: RouteRequest) -> int:
    if len(indices) == 1:
        return indices[0]
    worker_ids = [able[i].worker_id for i in indices]
    key = seeded(request.seed, request.ring_key)
    return indices[worker_ids.index(nearest(worker_ids, key, request.num_virtual_nodes))]


def _scores(costs: Costs) -> dict[str, float]:
    return dict(zip([view.worker_id for view in costs.views], costs.costs_s, strict=True))


def _decision(
    found: Estimate,
    limit: int,
    reasons: tuple[str, ...],
    scores_s: dict[str, float],
    num_skipped: int = 0,
    how: tuple[int, float, int, float] | None = None,
) -> Decision:
    view, expected_s, cached = found.view, found.expected_s, found.cached_tokens
    figures = (expected_s, found.own_s, found.uncached_tokens, found.wait_s, view.waiting_tokens, found.steps_s)
    told = Reasons(_say, reasons, how, figures, cached, view.num_in_flight, limit)
    return Decision(view.worker_id, limit, num_skipped, told, expected_s, cached, scores_s)


def _say(
    reasons: tuple[str, ...],
    how: tuple[int, float, int, float] | None,
    figures: tuple[float, float, int, float, int, float],
    cached_tokens: int,
    num_in_flight: int,
    limit: int,
) -> list[str]:
    said = list(reasons)
    if how is not None:
        num_near, ceiling_s, num_able, lowest_s = how
        what = f"first on the ring of {num_near}" if num_near > 1 else "the best cached"
        said.append(f"{what} within {ceiling_s:.3g} s; {num_able} workers from {lowest_s:.3g} s")
    expected_s, own_s, uncached_tokens, wait_s, waiting_tokens, steps_s = figures
    said += (
        f"{expected_s:.3g} s to the first token: {own_s:.3g} s for {uncached_tokens} tokens, "
        f"{wait_s:.3g} s behind {waiting_tokens} tokens, {steps_s:.3g} s beside decoding",
        f"{cached_tokens} of {cached_tokens + uncached_tokens} tokens cached",
        f"in flight {num_in_flight} below bound {limit}",
    )
    return said
