"""Comments in silent streams: when they are written, that they never meet another write, and how they are asked for."""

from __future__ import annotations

import asyncio
import time

import pytest

from naru_proto.errors import InvalidRequest
from naru_proto.names import HEADER_KEEPALIVE
from naru_router.adapters.http.keepalive import COMMENT, KeepAlive, read_keepalive

PERIOD_S = 0.02


class Events:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.last_write_s = time.monotonic()
        self.changed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.last_write_s = time.monotonic()
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.written) < count:
                self.changed.clear()
                await self.changed.wait()


async def test_a_silent_stream_gets_comments_until_its_end() -> None:
    events = Events()
    with KeepAlive(events, PERIOD_S):
        await events.until(2)
        events.write(b"data: 1\n\n")
        await events.until(len(events.written) + 1)
    count = len(events.written)
    await asyncio.sleep(3 * PERIOD_S)
    assert len(events.written) == count
    assert events.written[:2] == [COMMENT, COMMENT] and events.written[-1] == COMMENT
    assert events.written.count(b"data: 1\n\n") == 1 and set(events.written) == {b"data: 1\n\n", COMMENT}
    assert COMMENT.startswith(b":") and COMMENT.endswith(b"\n\n")


async def test_a_stream_that_does_not_ask_gets_none() -> None:
    events = Events()
    with KeepAlive(events, 0.0):
        await asyncio.sleep(2 * PERIOD_S)
        events.write(b"data: 1\n\n")
    assert events.written == [b"data: 1\n\n"]


async def test_comments_keep_their_distance_from_what_is_said() -> None:
    events = Events()
    with KeepAlive(events, PERIOD_S):
        times_s = []
        for _ in range(3):
            events.write(b"data: 1\n\n")
            before_s = events.last_write_s
            await events.until(len(events.written) + 1)
            times_s.append(events.last_write_s - before_s)
    assert min(times_s) >= PERIOD_S


async def test_an_error_is_followed_by_no_comment() -> None:
    events = Events()
    with pytest.raises(ValueError, match="the load failed"), KeepAlive(events, PERIOD_S):
        await events.until(1)
        raise ValueError("the load failed")
    count = len(events.written)
    await asyncio.sleep(3 * PERIOD_S)
    assert len(events.written) == count


@pytest.mark.parametrize(("text", "expected"), [(None, 0.0), ("", 0.0), ("1", 1.0), (" 2.5 ", 2.5), ("60", 60.0)])
def test_the_header_names_seconds(text: str | None, expected: float) -> None:
    assert read_keepalive({HEADER_KEEPALIVE: text}.get) == expected


@pytest.mark.parametrize("text", ["0", "0.5", "61", "-1", "nan", "inf", "1e1", "five", "1" * 10_000, "１"])
def test_other_values_of_the_header_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="x-naru-keepalive") as caught:
        read_keepalive({HEADER_KEEPALIVE: text}.get)
    assert caught.value.param == HEADER_KEEPALIVE and len(caught.value.message) < 200
