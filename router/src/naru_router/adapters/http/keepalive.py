"""Comments in a stream of events while nothing else is sent, for clients and proxies that give up on silence.

Asked for with a header. The first comment commits the reply's status to 200; an error that comes later is an event of
the stream. Used by the endpoints around a streamed answer, from before its model is looked for.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from naru_proto.errors import InvalidRequest
from naru_proto.names import HEADER_KEEPALIVE

COMMENT = b": waiting\n\n"
"""A line that starts with a colon: every reader of server-sent events skips it."""
MIN_PERIOD_S, MAX_PERIOD_S = 1.0, 60.0
_NUMBER = re.compile(r"[0-9]{1,4}(\.[0-9]{1,6})?")


def read_keepalive(get: Callable[[str], str | None]) -> float:
    """Seconds between comments that a call asks for; 0: none.

    Args:
        get: a header's text by its lower-case name, None where it is absent.

    Raises:
        InvalidRequest: it is no number, or out of range.
    """
    text = get(HEADER_KEEPALIVE)
    if text is None or not text.strip():
        return 0.0
    period_s = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    if not MIN_PERIOD_S <= period_s <= MAX_PERIOD_S:
        raise InvalidRequest(
            f"the header {HEADER_KEEPALIVE} is {text[:40]!r}; it must be a number of seconds in "
            f"[{MIN_PERIOD_S:g}, {MAX_PERIOD_S:g}]",
            param=HEADER_KEEPALIVE,
        )
    return period_s


class Events(Protocol):
    """The stream."""

    last_write_s: float
    """When the client was last sent something, on the monotonic clock."""

    def write(self, data: bytes) -> None:
        """Sends whole events, or a comment, in one write."""


class KeepAlive:
    """Writes a comment whenever a stream has been silent for a period, while its context lasts.

    The stream must not be closed before the context ends, unless nothing is waited for in between.
    """

    def __init__(self, events: Events, period_s: float) -> None:
        """`period_s` 0: no comments are written."""
        self._events = events
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> KeepAlive:
        if self._period_s > 0:
            self._set_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        delay_s = max(0.0, self._events.last_write_s + self._period_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        if time.monotonic() - self._events.last_write_s >= self._period_s:
            self._events.write(COMMENT)
        self._set_timer()
