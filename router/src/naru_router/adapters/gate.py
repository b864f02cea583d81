"""Admission of requests: counts the ones inside, refuses new ones while the router drains. Used by both edges."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from naru_proto.errors import Unavailable


class Gate:
    """Open until `close`."""

    def __init__(self) -> None:
        self.is_draining = False
        self.is_leaving = False
        """The process is to end: readiness says so, though requests may still be taken for a while."""
        self._num_inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inside(self) -> int:
        """Requests admitted and not ended."""
        return self._num_inside

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place for one request.

        Raises:
            Unavailable: the router drains.
        """
        if self.is_draining:
            raise Unavailable("the router is shutting down; send the request again")
        self._num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._idle.set()

    def close(self) -> None:
        """Refuses new requests from now on."""
        self.is_leaving = self.is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """True when everybody has left within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
