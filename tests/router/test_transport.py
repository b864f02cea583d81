"""What many, large and odd requests meet on their way: no hidden limits, none that a client can make others pay for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import httpx
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, info, simple
from stub_worker import STOP, hang, usage

from naru_proto import names
from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire

MIB = 1024 * 1024


async def test_hundreds_of_slow_streams_all_begin_at_once(rig: Rig) -> None:
    num_streams = 400
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{i}", hang("first")) for i in range(2)]
    await rig.start_router()
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=str(rig.client.base_url), timeout=60, limits=limits) as client:
        first = asyncio.Semaphore(0)

        async def ask(index: int) -> None:
            async with client.stream(
                "POST", COMPLETION, json=body(COMPLETION, prompt=f"{index}", stream=True)
            ) as reply:
                async for chunk in reply.aiter_raw():
                    assert b"first" in chunk
                    first.release()

        streams = [asyncio.create_task(ask(i)) for i in range(num_streams)]
        async with asyncio.timeout(60):
            for _ in range(num_streams):  # none ends before all have begun
                await first.acquire()
        assert sum(len(worker.running) for worker in workers) == num_streams
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    for worker in workers:
        await worker.until(lambda worker=worker: not worker.running)  # type: ignore[misc]


async def test_prompts_and_answers_of_megabytes_pass(rig: Rig) -> None:
    answer = "y" * (6 * MIB)

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(text=answer, num_tokens=1)
        yield wire.Delta(finish_reason=STOP, usage=usage(), request_done=True)

    await rig.publish_model()
    worker = await rig.start_worker(script=script, facts=info(max_model_len=1_000_000))
    await rig.start_router(max_body_bytes=16 * MIB)
    prompt = "x" * (5 * MIB)
    response = await rig.post(COMPLETION, body(COMPLETION, prompt=prompt))
    assert response.status_code == 200 and response.json()["choices"][0]["text"] == answer
    options = [("grpc.max_receive_message_length", 16 * MIB)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}", options=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inf.InferenceGenerateRequest(model=MODEL, prompt=prompt)
        assert "".join([reply.text async for reply in stub.Generate(request)]) == answer
    assert [sent.text == prompt for sent in worker.requests] == [True, True]


async def test_a_prompt_that_fits_no_context_never_reaches_a_worker(rig: Rig) -> None:
    worker = await simple(rig)
    response = await rig.post(COMPLETION, body(COMPLETION, prompt="x" * (2 * MIB)))
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for size, status in (
            (2 * MIB, grpc.StatusCode.INVALID_ARGUMENT),
            (9 * MIB, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt="x" * size)):
                    pass
            assert caught.value.code() == status
    assert worker.requests == []


async def test_model_names_are_taken_as_they_are(rig: Rig) -> None:
    name = "org/Name-1.0:chat"
    await rig.publish_model(name)
    await rig.start_worker(models=(name,))
    await rig.start_router()
    for path in (name, quote(name, safe="")):
        assert (await rig.client.get(f"/v1/models/{path}")).json()["id"] == name
    assert [card["id"] for card in (await rig.client.get("/v1/models")).json()["data"]] == [name]
    assert (await rig.post(CHAT, {**body(CHAT), "model": name})).json()["model"] == name
    for other in (name.lower(), f"{name} ", f" {name}", name.replace("/", "%2F"), "org", "Name-1.0:chat", "x" * 10_000):
        response = await rig.post(CHAT, {**body(CHAT), "model": other})
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
        assert len(response.content) < 1000
    assert (await rig.post(CHAT, {**body(CHAT), "model": ""})).status_code == 400


async def test_names_that_clients_make_up_leave_no_trace_in_metrics_or_on_the_board(rig: Rig) -> None:
    await simple(rig)
    before = {*await rig.board.keys()}
    for index in range(300):
        await rig.post(COMPLETION, {**body(COMPLETION), "model": f"made-up/{index}"})
    text = (await rig.client.get("/metrics")).text
    assert "made-up" not in text
    assert 'naru_router_requests_total{endpoint="completion",model="",status="404"} 300.0' in text
    added = {*await rig.board.keys()} - before
    assert not [key for key in added if b"made-up" in key]


async def test_a_workers_request_has_nothing_of_the_clients_headers(rig: Rig) -> None:
    worker = await simple(rig)
    secrets = {"authorization": "Bearer secret-key", "cookie": "secret-cookie", "x-secret": "secret-header"}
    for path in (CHAT, COMPLETION):
        assert (await rig.client.post(path, json=body(path), headers=secrets)).status_code == 200
    assert len(worker.requests) == 2
    assert all(b"secret" not in request.SerializeToString() for request in worker.requests)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_where_a_request_went_is_told_to_who_asks(rig: Rig, path: str, is_stream: bool) -> None:
    await simple(rig)
    data = body(path, stream=is_stream)
    asked = await rig.client.post(path, json=data, headers={names.HEADER_EXPLAIN: "1"})
    assert asked.status_code == 200 and asked.headers[names.HEADER_ROUTE].startswith("w0; ")
    for answer in ("0", "false", ""):
        plain = await rig.client.post(path, json=data, headers={names.HEADER_EXPLAIN: answer})
        assert plain.status_code == 200 and names.HEADER_ROUTE not in plain.headers


async def test_a_stream_of_several_prompts_tells_of_the_first(rig: Rig) -> None:
    await simple(rig)
    data = body(COMPLETION, prompt=["a", "b", "c"], stream=True)
    response = await rig.client.post(COMPLETION, json=data, headers={names.HEADER_EXPLAIN: "1"})
    assert response.headers[names.HEADER_ROUTE].startswith("w0; ")
    texts = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    assert {event["choices"][0]["index"] for event in texts} == {0, 1, 2}


async def test_a_client_that_reads_nothing_costs_its_own_request_alone(rig: Rig) -> None:
    async def flood(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        if request.text == "short":
            yield wire.Delta(text="done", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)
            return
        while True:
            yield wire.Delta(text="x" * 50_000, num_tokens=1)
            await asyncio.sleep(0.001)

    worker = await simple(rig, flood, max_unsent_bytes=4_000_000)
    writers = []
    content = json.dumps(body(COMPLETION, stream=True)).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port, limit=4096)
        writer.write(head + content)
        writers.append((reader, writer))
    await worker.until(lambda: len(worker.cancelled) >= 15, timeout_s=60)
    backlog = rig.app._http.backlog
    assert backlog.num_bytes <= 4_000_000 and backlog.num_ended >= 15
    response = await rig.post(COMPLETION, body(COMPLETION, prompt="short"))
    assert response.json()["choices"][0]["text"] == "done"
    for _, writer in writers:
        writer.close()
    await worker.until(lambda: not worker.running, timeout_s=60)
    await rig.until(lambda: rig.app.gate.num_inside == 0)
