"""Takes many steps at once, so that one that fails or hangs stands in no other's way. Used by all that carries out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from naru_operator.adapters.kube.errors import NotLeader
from naru_proto.errors import NaruError


async def take_all(steps: Iterable[Awaitable[None]], at_once: int) -> list[NaruError]:
    """Takes all steps, at most so many at once; returns what went wrong, in the order of the steps.

    Raises:
        NotLeader: this replica may not act any more; raised when all have ended.
        Exception: what is no NaruError, a fault of our own; raised when all have ended.
    """
    gate = asyncio.Semaphore(at_once)

    async def take(step: Awaitable[None]) -> None:
        async with gate:
            await step

    results = await asyncio.gather(*map(take, steps), return_exceptions=True)
    failures = [result for result in results if result is not None]
    for failure in failures:
        if isinstance(failure, NotLeader) or not isinstance(failure, NaruError):
            raise failure
    return [failure for failure in failures if isinstance(failure, NaruError)]
