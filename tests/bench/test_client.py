from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from bench.client import run_batch

STREAM = (
    b"HTTP/1.1 200 OK\r\n\r\n"
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [{"text": "b"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


class FakeServer:
    """Answers only when `num_requests` of them have arrived: a client that sends one by one would wait for ever."""

    def __init__(self, num_requests: int, answer: bytes) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._all_here = asyncio.Barrier(num_requests)
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        await self._all_here.wait()
        writer.write(self._answer)
        await writer.drain()
        writer.close()


async def report_of(num_requests: int, answer: bytes, timeout_s: float = 20) -> tuple[dict[str, Any], FakeServer]:
    fake = FakeServer(num_requests, answer)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        bodies = [{"prompt": f"{index}"} for index in range(num_requests)]
        return await run_batch("127.0.0.1", port, bodies, timeout_s), fake


async def test_all_requests_of_a_batch_are_out_before_the_first_is_answered() -> None:
    report, fake = await report_of(4, STREAM)
    assert sorted(body["prompt"] for body in fake.bodies) == ["0", "1", "2", "3"]
    assert [entry["completion_tokens"] for entry in report["requests"]] == [2, 2, 2, 2]
    assert all(0 < entry["ttft_s"] <= entry["total_s"] <= report["wall_s"] for entry in report["requests"])
    assert 0 <= report["client_cpu_s"]


async def test_a_request_that_waits_is_sent_when_the_others_have_begun_to_answer() -> None:
    order: list[str] = []
    both_streams = asyncio.Barrier(2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        name = json.loads(await reader.readexactly(length))["prompt"]
        order.append(f"{name} asked")
        if name != "late":
            await both_streams.wait()
            order.append(f"{name} answered")
        writer.write(STREAM)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        bodies = [{"prompt": name} for name in ("late", "a", "b")]
        report = await run_batch("127.0.0.1", port, bodies, 20, after=[1, 0, 0])
    assert order[-1] == "late asked"
    assert [entry["completion_tokens"] for entry in report["requests"]] == [2, 2, 2]
    late, *others = (entry["sent_s"] for entry in report["requests"])
    assert late > max(others) >= 0


async def test_a_refusal_is_reported_for_its_request() -> None:
    report, _ = await report_of(1, b"HTTP/1.1 400 Bad Request\r\n\r\nmax_tokens is -1")
    assert report["requests"] == [{"error": "HTTP/1.1 400 Bad Request: max_tokens is -1"}]


async def test_a_server_that_never_answers_is_reported_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        report = await run_batch("127.0.0.1", silent.getsockname()[1], [{"prompt": "x"}], 0.05)
    assert report == {"error": "1 of 1 requests were not answered within 0.05 s"}
