"""How many requests of all batches of this router are in flight: never more than may be, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Slots:
    """An asynchronous context each request is run in."""

    def __init__(self, most: Callable[[], int]) -> None:
        """`most`: how many there may be at this instant."""
        self.most = most
        self._num_used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        while self._num_used >= self.most():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # the turn may have been given already
                raise
        self._num_used += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_used -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
