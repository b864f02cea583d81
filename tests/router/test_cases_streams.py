"""The HTTP edge as clients meet it: headers between the two, many streams, large bodies, clients who do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, info, poll, simple
from stub_worker import STOP, StubWorker, say, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc, worker_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
STREAM = pytest.mark.parametrize("stream", [False, True])
MIB = 1024 * 1024
HOP_BY_HOP = {"te", "trailer", "upgrade", "proxy-authenticate", "keep-alive", "content-encoding", "x-secret"}


@STREAM
@BOTH
async def test_headers_between_two_hops_stay_there_and_lengths_are_true(rig: Rig, path: str, stream: bool) -> None:
    worker = await simple(rig)
    headers = {
        "accept-encoding": "gzip, br",
        "connection": "X-Secret, close",
        "x-secret": "mine",
        "te": "trailers",
        "authorization": "Bearer sk-very-secret",
        "x-request-id": "request-7",
        "expect": "100-continue",
    }
    content = json.dumps(body(path, stream=stream)).encode()
    async with httpx.AsyncClient(base_url=rig.client.base_url, timeout=20) as client:
        async with client.stream("POST", path, content=content, headers=headers) as reply:
            raw = b"".join([chunk async for chunk in reply.aiter_raw()])
    assert reply.status_code == 200 and reply.headers["x-request-id"] == "request-7"
    assert not HOP_BY_HOP & set(reply.headers)
    if stream:
        assert reply.headers["transfer-encoding"] == "chunked" and "content-length" not in reply.headers
        assert "no-cache" in reply.headers["cache-control"] and reply.headers["x-accel-buffering"] == "no"
        assert raw.endswith(b"data: [DONE]\n\n")
    else:
        assert "transfer-encoding" not in reply.headers and int(reply.headers["content-length"]) == len(raw)
        assert json.loads(raw)["object"]
    assert reply.headers["connection"] == "close"
    assert "secret" not in str(worker.requests) and "mine" not in str(worker.requests)


async def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(rig: Rig) -> None:
    await simple(rig)
    content = json.dumps(body(COMPLETION, prompt="x" * 5000)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port)
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode())
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(content)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await writer.wait_closed()


async def test_four_hundred_slow_streams_all_begin_though_none_has_ended(rig: Rig) -> None:
    gate = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(text="first", num_tokens=1)
        await gate.wait()
        async for delta in say("rest")(request):
            yield delta

    await rig.publish_model()
    workers = [await rig.start_worker(f"w{number}", script) for number in range(2)]
    await rig.start_router()
    num_begun = 0

    async def ask() -> bytes:
        nonlocal num_begun
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port)
        content = json.dumps(body(COMPLETION, stream=True)).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        data = await reader.readuntil(b"first")
        num_begun += 1
        data += await reader.read()
        writer.close()
        await writer.wait_closed()
        return data

    asked = [asyncio.create_task(ask()) for _ in range(400)]

    async def have_all_begun() -> bool:
        return num_begun == 400

    await poll(have_all_begun, timeout_s=30)
    assert sum(len(worker.running) for worker in workers) == 400
    text = (await rig.client.get("/metrics")).text
    shown = [float(line.split()[1]) for line in text.splitlines() if line.startswith("naru_router_requests_in_flight{")]
    assert sum(shown) == 400
    gate.set()
    assert all(data.count(b"rest") == 1 and b"[DONE]" in data for data in await asyncio.gather(*asked))


class LargeWorker(StubWorker):
    """Takes what real workers take in one message."""

    async def start(self, port: int = 0) -> None:
        size = 64 * MIB
        options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *options])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()


async def large(rig: Rig, script: Any, **settings: Any) -> LargeWorker:
    await rig.publish_model()
    worker = LargeWorker("w0", script)
    await worker.start()
    rig.workers["w0"] = worker
    await rig.publish_worker("w0", facts=info(max_model_len=10_000_000))
    await rig.start_router(**settings)
    return worker


async def test_a_prompt_of_six_megabytes_gets_there_whole_and_one_too_large_is_refused(rig: Rig) -> None:
    worker = await large(rig, say("ok"))
    prompt = "".join(f"{number:>7} " for number in range(6 * MIB // 8))
    assert (await rig.post(COMPLETION, body(COMPLETION, prompt=prompt))).status_code == 200
    assert worker.requests[-1].text == prompt
    ids = list(range(0, 1_500_000))
    assert (await rig.post(COMPLETION, body(COMPLETION, prompt=ids[:700_000]))).status_code == 200
    refused = await rig.post(COMPLETION, body(COMPLETION, prompt=prompt * 2))
    assert refused.status_code in (400, 413) and refused.json()["error"]["type"] == "invalid_request_error"
    assert len(worker.requests) == 2
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{rig.app.grpc_port}", options=[("grpc.max_send_message_length", 64 * MIB)]
    ) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        texts = [r.text async for r in stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt=prompt))]
        assert "".join(texts) == "ok" and worker.requests[-1].text == prompt


async def test_an_answer_with_many_megabytes_of_logprobs_gets_through(rig: Rig) -> None:
    top = [inf.TokenLogprob(token_id=i, token="t" * 200, logprob=-0.5, rank=i) for i in range(1, 21)]
    position = inf.PositionLogprobs(chosen=top[0], top=top)

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for _ in range(2):
            yield wire.Delta(text="x" * 1500, num_tokens=1500, logprobs=[position] * 1500)
        yield wire.Delta(finish_reason=STOP, usage=usage(completion=3000), request_done=True)

    await large(rig, script)
    assert position.ByteSize() * 1500 > 4 * MIB
    reply = await rig.post(CHAT, body(CHAT, logprobs=True, top_logprobs=20))
    assert reply.status_code == 200 and len(reply.json()["choices"][0]["logprobs"]["content"]) == 3000


async def test_clients_who_do_not_read_hold_no_more_than_the_limit_and_harm_nobody(rig: Rig) -> None:
    """Each opens a stream without an end and takes nothing of it."""
    piece, num_clients, limit = "y" * 65536, 20, 4 * MIB
    most = 0

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        nonlocal most
        while request.text == "much":
            yield wire.Delta(text=piece, num_tokens=1)
            await asyncio.sleep(0.002)  # a frame has a step's text, not all of it
            most = max(most, rig.app._http.backlog.num_bytes)
        async for delta in say(piece)(request):
            yield delta

    worker = await simple(rig, script, max_unsent_bytes=limit)
    content = json.dumps(body(COMPLETION, prompt="much", stream=True)).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    silent = []
    for _ in range(num_clients):
        taker = socket.socket()
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the kernel would read for it
        taker.connect(("127.0.0.1", rig.app.http_port))
        taker.sendall(head + content)
        silent.append(taker)

    async def are_all_ended() -> bool:
        return rig.app._http.backlog.num_ended == num_clients and not worker.running

    await poll(lambda: _is_asked(worker, num_clients))
    reply = await rig.post(COMPLETION, body(COMPLETION, prompt="little"))
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == piece
    await poll(are_all_ended, timeout_s=30)
    # What one frame adds is seen before anybody is ended for it.
    assert 0 < most <= limit + 2 * MIB
    assert (rig.app.gate.num_inside, rig.app._http.backlog.num_bytes) == (0, 0)
    for taker in silent:
        taker.close()


async def _is_asked(worker: StubWorker, count: int) -> bool:
    return len(worker.requests) == count
