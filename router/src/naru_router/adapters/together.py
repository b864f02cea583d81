"""Parts of one request that run at once, and stand or fall together. Used where a call is cut into several jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


async def all_or_none(works: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Runs all at once; the first failure cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
