"""Sends Kubernetes events beside the control loop, few at a time: they are for people, and nothing waits for them.

Called by what carries out plans and tells statuses. What is worth an event is decided in `core`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from naru_operator.core.kube import Object, ObjectEvent

_MAX_AT_ONCE = 4
"""Statuses share the client's threads and go first."""
_MAX_WAITING = 4096
"""More than these are dropped: an API server that is away hears none of them anyway."""
_BURST, _RATE_PER_S = 100, 5.0
"""Events that are no warnings: so many at once, and so many in the long run. Thousands of models that come up together
would else cost as many writes again, and nobody reads that many.
"""


class EventClient(Protocol):
    """What sends."""

    async def event(self, event: ObjectEvent, involved: Object) -> None:
        """Tells an event about an object; never raises."""


class EventSender:
    """Events under way. asyncio thread only."""

    def __init__(self, client: EventClient) -> None:
        self._client = client
        self._gate = asyncio.Semaphore(_MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._allowance = float(_BURST)
        self._allowed_s = time.monotonic()

    def send(self, event: ObjectEvent, involved: Object) -> None:
        """Sends it when there is time; drops it where there are too many."""
        if len(self._tasks) >= _MAX_WAITING or not (event.is_warning or self._is_allowed()):
            return
        task = asyncio.create_task(self._send(event, involved), name=f"event {event.reason}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_allowed(self) -> bool:
        now_s = time.monotonic()
        self._allowance = min(float(_BURST), self._allowance + _RATE_PER_S * (now_s - self._allowed_s))
        self._allowed_s = now_s
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    async def close(self) -> None:
        """Gives up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, event: ObjectEvent, involved: Object) -> None:
        async with self._gate:
            await self._client.event(event, involved)
