"""Threads that compile grammars: few at a time, each with a stack deep enough for the recursion in the library.

Called by the grammar compiler in the asyncio thread. A thread cannot be stopped: one that takes too long is left to
itself, and its place is free when it ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from naru_proto.errors import InternalError, Overloaded

_T = TypeVar("_T")

MAX_THREADS = 2
STACK_BYTES = 256 << 20
"""Addresses, of which only what is touched takes memory. The longest chain of references that a grammar's size allows
takes about 10 KB a link."""
TURN_WAIT_S = 10.0
"""A compilation waits so long for others to end."""

_stack_lock = threading.Lock()


class GrammarThreads:
    """Asyncio thread only."""

    def __init__(self, max_threads: int = MAX_THREADS) -> None:
        self._places = asyncio.Semaphore(max_threads)

    async def run(self, work: Callable[[], _T], limit_s: float) -> _T:
        """What `work` gives or raises.

        Raises:
            TimeoutError: it takes longer than `limit_s`.
            Overloaded: others compile for too long.
        """
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await self._places.acquire()
        except TimeoutError as exc:
            raise Overloaded("the worker compiles other grammars; ask again later") from exc
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def end(result: _T | None, error: BaseException | None) -> None:
            self._places.release()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # of a work that gives None, too

        def main() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as exc:
                error = exc
            except BaseException as exc:
                # A panic of the library, which is no Exception: it must not end as a thread's traceback.
                error = InternalError(f"the grammar could not be compiled ({type(exc).__name__})")
            try:
                loop.call_soon_threadsafe(end, result, error)
            except RuntimeError:
                pass  # the loop is closed: nobody waits

        try:
            _start(main)
        except BaseException:
            self._places.release()
            raise
        async with asyncio.timeout(limit_s):
            return await future


def _start(main: Callable[[], None]) -> None:
    with _stack_lock:
        # Threads that others begin meanwhile get the addresses as well, which costs nothing.
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=main, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
