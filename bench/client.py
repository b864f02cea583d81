"""The one client program: sends a batch of completion requests at one instant and reports what it saw.

`bench.measure` starts it as a process of its own for every batch (``python -m bench.client``, a JSON job on standard
input, JSON on standard output). While requests run it only appends received bytes and a clock reading to a list;
parsing comes after the last one ended. It does not judge the answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.stream import DONE, StreamError, parse


class _Recorder(asyncio.Protocol):
    """One connection: sends one request, records every arrival, ends at DONE or when the server closes."""

    def __init__(self) -> None:
        self.on_piece: Callable[[], None] | None = None
        self.sent_s = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        assert self._transport is not None
        self.sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter() - self.sent_s, data))
        window = self._tail + data
        if DONE in window and self._transport is not None:
            self._transport.close()
        self._tail = window[-(len(DONE) - 1) :]
        if self.on_piece is not None:
            self.on_piece()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self.on_piece is not None:
            self.on_piece()


def http_request(host: str, port: int, body: dict[str, Any]) -> bytes:
    """One POST to the completions endpoint, as bytes."""
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + payload


class _Gate:
    """Sends the requests that wait for others: each when all that were sent at once have got so many pieces."""

    def __init__(self, first: Sequence[_Recorder], waiting: Sequence[tuple[int, _Recorder, bytes]]) -> None:
        self._first = first
        self._waiting = sorted(waiting, key=lambda entry: entry[0])
        for recorder in first if waiting else ():
            recorder.on_piece = self.look

    def look(self) -> None:
        """Sends what is due."""
        while self._waiting and all(
            len(recorder.pieces) > self._waiting[0][0] or recorder.ended.done() for recorder in self._first
        ):
            _, recorder, request = self._waiting.pop(0)
            recorder.send(request)


async def run_batch(
    host: str, port: int, bodies: Sequence[dict[str, Any]], timeout_s: float, after: Sequence[int] = ()
) -> dict[str, Any]:
    """Connects all, sends all, waits for all; returns wall and CPU seconds and one entry for each request.

    `after`, where given: for each request how many pieces those with 0 must have got before it is sent.
    """
    loop = asyncio.get_running_loop()
    recorders = [(await loop.create_connection(_Recorder, host, port))[1] for _ in bodies]
    requests = [http_request(host, port, body) for body in bodies]
    gc.collect()
    gc.disable()
    cpu_before, started_s = time.process_time(), time.perf_counter()
    entries = list(zip(after or [0] * len(bodies), recorders, requests, strict=True))
    gate = _Gate([recorder for pieces, recorder, _ in entries if not pieces], [entry for entry in entries if entry[0]])
    for pieces, recorder, request in entries:
        if not pieces:
            recorder.send(request)
    gate.look()
    _, unfinished = await asyncio.wait([recorder.ended for recorder in recorders], timeout=timeout_s)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_before
    gc.enable()
    if unfinished:
        return {"error": f"{len(unfinished)} of {len(bodies)} requests were not answered within {timeout_s:g} s"}
    return {"wall_s": wall_s, "client_cpu_s": cpu_s, "requests": [_result(r, started_s) for r in recorders]}


def _result(recorder: _Recorder, started_s: float) -> dict[str, Any]:
    try:
        return {**dataclasses.asdict(parse(recorder.pieces)), "sent_s": recorder.sent_s - started_s}
    except StreamError as exc:
        return {"error": str(exc)}


def main() -> int:
    """Reads the job, runs it, prints the report. A server that cannot be reached is part of the report."""
    job = json.load(sys.stdin)
    try:
        report = asyncio.run(run_batch(job["host"], job["port"], job["bodies"], job["timeout_s"], job.get("after", ())))
    except OSError as exc:
        report = {"error": f"cannot reach {job['host']}:{job['port']}: {exc}"}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
