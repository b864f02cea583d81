"""One request's place in its tenant's quotas, for all the jobs that it is cut into. Made by the edges.

A call of many prompts or inputs is one request: taken job by job, a tenant that may have one request at a time could
never make it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from naru_router.adapters.tenancy.quota_keeper import QuotaTicket


class Admission:
    """A context that is entered before the jobs run, and left when all of them have ended."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: that the whole request may cost."""
        self._num_tokens = num_tokens
        self._num_used = 0
        self._taking: asyncio.Future[QuotaTicket] | None = None

    async def take(self, admit: Callable[[int], Awaitable[QuotaTicket]]) -> None:
        """Waits until the request is let in: the first of its jobs asks, the others wait with it.

        Raises:
            QuotaExceeded: it is not, and neither are the others.
        """
        if self._taking is None:
            self._taking = asyncio.ensure_future(admit(self._num_tokens))
        await asyncio.shield(self._taking)

    def add_use(self, num_tokens: int) -> None:
        """A job has used so many."""
        self._num_used += num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        if self._taking is None:
            return
        if self._taking.done():
            self._settle(self._taking)  # now: the reply tells what is left
        else:
            self._taking.add_done_callback(self._settle)

    def _settle(self, taking: asyncio.Future[QuotaTicket]) -> None:
        # Also of a request that was let in when nobody waited any more.
        if not taking.cancelled() and taking.exception() is None:
            taking.result().settle(self._num_used)
