"""How long the load of a model has yet to take, by all this router knows. Asked by the dispatcher and the model facts.

Reads the route map and the load desk; keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from naru_router.adapters.load_site import Site
from naru_router.core.load_time import TimeLeft, time_left
from naru_router.core.route_map import RouteMap

_NEAR_STATES = ("host", "loading")
"""Of a copy that need not be fetched."""


class LoadTimes:
    """Answers for all models."""

    def __init__(
        self,
        route_map: Callable[[], RouteMap],
        site: Callable[[str], Site | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`site`: where a model comes up, if this router has asked."""
        self._route_map = route_map
        self._site = site
        self._clock = clock

    def left(self, model: str) -> TimeLeft:
        """What is left of a model's load; unknown where no load was ever measured."""
        route_map, site = self._route_map(), self._site(model)
        elapsed_s = 0.0 if site is None else self._clock() - site.began_s
        told_s, told_age_s = route_map.eta_s(model), 0.0
        if not told_s and site is not None:
            told_s, told_age_s = site.eta_s, elapsed_s
        states = {w.models[model].state for w in route_map.workers.values() if model in w.models}
        is_near = not states.isdisjoint(_NEAR_STATES)
        footprint = route_map.footprints.get(model)
        return time_left(told_s, told_age_s, footprint, is_near=is_near, elapsed_s=elapsed_s)
