"""Serves on while this worker's models move: it was asked to end, and others are to have them first.

Made and started by the app. What is needed elsewhere is decided in `core.leaving`; bringing it up there is the control
plane's work, which sees `leaving` in the lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.registry import LeaseKeeper
from naru_worker.core.leaving import unmoved_models

_log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
"""Between two looks at where else the models are."""


class Departure:
    """One worker's wait before its drain."""

    def __init__(self, hub: ModelHub, lease: LeaseKeeper, timeout_s: float) -> None:
        self._hub = hub
        self._lease = lease
        self._timeout_s = timeout_s

    async def run(self, on_over: Callable[[], None]) -> None:
        """Calls `on_over` when no model here is needed any more, or after `timeout_s`."""
        _log.info("asked to end: serving on for at most %g s, until the models are ready elsewhere", self._timeout_s)
        self._lease.poke()
        deadline_s = time.monotonic() + self._timeout_s
        told: list[str] | None = None
        while True:
            others = await self._lease.others()
            # Asked after the reading: a model that has left meanwhile need not be anywhere.
            serving = {r.name: r.entry.generation for r in self._hub.residents() if r.state.is_serving}
            unmoved = sorted(serving) if others is None else unmoved_models(serving, others)
            if not unmoved or time.monotonic() >= deadline_s:
                break
            if unmoved != told:
                told = unmoved
                _log.info("not ready on another worker yet: %s", ", ".join(unmoved))
            await asyncio.sleep(min(LOOK_INTERVAL_S, max(0.0, deadline_s - time.monotonic())))
        if unmoved:
            _log.warning("after %g s still not ready elsewhere: %s; draining", self._timeout_s, ", ".join(unmoved))
        else:
            _log.info("%s; draining", "every model here is ready elsewhere" if serving else "no model is loaded here")
        on_over()
