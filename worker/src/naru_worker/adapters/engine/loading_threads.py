"""Threads for blocking work of loads and unloads: a result, a time limit, and what comes too late.

Called by the operations of the hub in the asyncio thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")

STOP_GRACE_S = 5.0
"""A thread that was told to stop has this long to let go."""


class StillRunning(TimeoutError):
    """The time is over, and the thread has not let go."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        super().__init__()
        self.future = future
        """Done when it does."""


class LoadingThreads:
    """A pool of threads. Not thread-safe itself: asyncio thread only."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="load")

    async def run_freely(self, work: Callable[[], None]) -> None:
        """Runs what has to be done to its end, however long it takes."""
        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run(
        self, stop: threading.Event, limit_s: float, work: Callable[[], _T], discard: Callable[[_T | None], None]
    ) -> _T:
        """Result of `work`, which is told to `stop` at the limit; what comes too late (None: an error) is discarded.

        Raises:
            StillRunning: the limit has passed, and a grace as well.
            TimeoutError: the limit has passed, and the thread has let go.
        """
        future = asyncio.wrap_future(self._pool.submit(work))
        done, _ = await asyncio.wait({future}, timeout=limit_s)
        if done:
            return future.result()
        stop.set()
        done, _ = await asyncio.wait({future}, timeout=STOP_GRACE_S)
        if not done:

            def late(ended: asyncio.Future[_T]) -> None:
                if not ended.cancelled():
                    discard(None if ended.exception() else ended.result())

            future.add_done_callback(late)
            raise StillRunning(future)
        if future.exception() is None:
            return future.result()  # late, and whole: nobody is helped by throwing it away
        raise TimeoutError

    def close(self) -> None:
        """Takes no more work; threads that are stuck are left behind."""
        self._pool.shutdown(wait=False, cancel_futures=True)
