"""Reads a recorded streamed completion: raw HTTP bytes with arrival times in, timings and usage out. Pure.

The client only records while it measures; this module does the parsing afterwards, so that it costs the engine nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]"


class StreamError(Exception):
    """The answer is not a complete, successful stream of a completion."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One request as its client saw it. Times in seconds since the request was sent."""

    ttft_s: float
    total_s: float
    gaps_s: tuple[float, ...]
    """Between consecutive chunks of output (ITL where a chunk is a token)."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, as far as the server says so; 0 where it does not."""
    num_chunks: int
    sent_s: float = 0.0
    """When it was sent, since the batch began."""


def parse(pieces: Sequence[tuple[float, bytes]]) -> Timing:
    """Turns (seconds since sending, bytes received) into a Timing.

    Raises:
        StreamError: another status than 200, a broken or cut stream, an error event, or no usage figures.
    """
    raw = b"".join(data for _, data in pieces)
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        raise StreamError(f"no HTTP answer: {raw[:200]!r}")
    status = head.split(b"\r\n", 1)[0]
    if status.split(b" ")[1:2] != [b"200"]:
        raise StreamError(f"{status.decode('latin-1')}: {body[:500].decode('utf-8', 'replace')}")
    offset = len(head) + len(separator)
    if b"transfer-encoding: chunked" in head.lower():
        spans = _chunked_spans(raw, offset)
    else:
        spans = [(offset, len(raw))]
    return _timing(_events(raw, spans, _Arrivals(pieces)))


@dataclass(frozen=True, slots=True)
class _Event:
    arrived_s: float
    data: bytes


class _Arrivals:
    """Answers when the byte at an offset arrived; offsets must not decrease from call to call."""

    def __init__(self, pieces: Sequence[tuple[float, bytes]]) -> None:
        self._pieces = pieces
        self._index = 0
        self._end = len(pieces[0][1]) if pieces else 0

    def at(self, offset: int) -> float:
        while offset >= self._end:
            self._index += 1
            self._end += len(self._pieces[self._index][1])
        return self._pieces[self._index][0]


def _chunked_spans(raw: bytes, offset: int) -> list[tuple[int, int]]:
    """Half-open ranges of payload in a chunked body. The last chunk may be missing: the client may stop at DONE."""
    spans: list[tuple[int, int]] = []
    while True:
        line_end = raw.find(b"\r\n", offset)
        if line_end < 0:
            return spans
        try:
            size = int(raw[offset:line_end].split(b";", 1)[0], 16)
        except ValueError as exc:
            raise StreamError(f"chunk size {raw[offset:line_end][:40]!r} is no hexadecimal number") from exc
        start = line_end + 2
        if size == 0:
            return spans
        spans.append((start, min(start + size, len(raw))))
        offset = start + size + 2


def _events(raw: bytes, spans: Sequence[tuple[int, int]], arrivals: _Arrivals) -> list[_Event]:
    """Data lines of a server-sent event stream, each with the arrival of its last byte."""
    events: list[_Event] = []
    line = bytearray()
    for start, end in spans:
        position = start
        while position < end:
            newline = raw.find(b"\n", position, end)
            if newline < 0:
                line += raw[position:end]
                break
            line += raw[position:newline]
            if line.startswith(b"data:"):
                events.append(_Event(arrivals.at(newline), bytes(line[5:]).strip()))
            line.clear()
            position = newline + 1
    return events


def _timing(events: Sequence[_Event]) -> Timing:
    if not events or events[-1].data != b"[DONE]":
        last = events[-1].data[:200] if events else b""
        raise StreamError(f"the stream ended before [DONE]; its last event was {last!r}")
    usage: dict[str, Any] | None = None
    arrivals: list[float] = []
    first_text_s: float | None = None
    for event in events[:-1]:
        message = _json(event.data)
        if message.get("usage"):
            usage = message["usage"]
        choices = message.get("choices") or []
        text = choices[0].get("text") if choices else None
        if text:
            first_text_s = event.arrived_s if first_text_s is None else first_text_s
            arrivals.append(event.arrived_s)
    if usage is None:
        raise StreamError("the stream carried no usage figures")
    end_s = events[-1].arrived_s
    details = usage.get("prompt_tokens_details") or {}
    return Timing(
        ttft_s=end_s if first_text_s is None else first_text_s,
        total_s=end_s,
        gaps_s=tuple(after - before for before, after in itertools.pairwise(arrivals)),
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage["completion_tokens"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        num_chunks=len(arrivals),
    )


def _json(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError as exc:
        raise StreamError(f"event {data[:200]!r} is not JSON") from exc
    if not isinstance(message, dict) or "error" in message:
        raise StreamError(f"the server sent {data[:500].decode('utf-8', 'replace')}")
    return message
