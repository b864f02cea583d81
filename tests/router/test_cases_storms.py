"""All workers refuse, or break off late: how often they are asked, and what the client hears."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, events
from stub_worker import STOP, StubWorker, fail, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire

STREAM = pytest.mark.parametrize("stream", [False, True])


async def refusing(rig: Rig, retry_after_s: float = 0.0) -> list[StubWorker]:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        error = wire.Error(code="rate_limit_exceeded", message="full", retryable=True, retry_after_s=retry_after_s)
        yield wire.Delta(error=error, request_done=True)

    await rig.publish_model(max_retries=5)
    workers = [await rig.start_worker(f"w{number}", script) for number in range(4)]
    await rig.start_router()
    return workers


@STREAM
async def test_where_all_workers_refuse_each_request_asks_two_at_most_and_is_told_to_come_back(
    rig: Rig, stream: bool
) -> None:
    workers = await refusing(rig, retry_after_s=7.0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=rig.client.base_url, timeout=20, limits=limits) as client:
        sent = [
            client.post(COMPLETION, json=body(COMPLETION, prompt=f"prompt {number}", stream=stream))
            for number in range(30)
        ]
        replies = await asyncio.gather(*sent)
    assert {(reply.status_code, reply.headers["retry-after"]) for reply in replies} == {(429, "7")}
    assert {reply.json()["error"]["code"] for reply in replies} == {"rate_limit_exceeded"}
    attempts = Counter(request.text for worker in workers for request in worker.requests)
    assert set(attempts) == {f"prompt {number}" for number in range(30)} and max(attempts.values()) <= 2
    # Once two in a row have refused, the others are not bothered with what would be in vain.
    assert attempts.total() <= 2 * 30
    before = attempts.total()
    assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 429
    assert sum(len(worker.requests) for worker in workers) == before + 1
    ids = [request.request_id for worker in workers for request in worker.requests]
    assert len(set(ids)) == len(ids)


async def test_a_grpc_call_is_not_multiplied_either(rig: Rig) -> None:
    workers = await refusing(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt="x")):
                pass
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sum(len(worker.requests) for worker in workers) == 2


@pytest.mark.parametrize("code", ["invalid_request_error", "context_length_exceeded", "quota_exceeded"])
async def test_what_is_the_clients_fault_is_asked_once_whatever_the_worker_says_of_retries(rig: Rig, code: str) -> None:
    await rig.publish_model(max_retries=5)
    workers = [await rig.start_worker(f"w{number}", fail(code, retryable=True)) for number in range(3)]
    await rig.start_router()
    reply = await rig.post(CHAT, body(CHAT))
    assert 400 <= reply.status_code < 500
    assert sum(len(worker.requests) for worker in workers) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_worker_lost_between_the_last_text_and_the_end_repeats_nothing(rig: Rig, path: str) -> None:
    """The other worker is told all that was said, and has only the end to say."""
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{number}") for number in range(2)]
    killed: list[StubWorker] = []

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        said = [token for prior in request.prior for token in prior.token_ids]
        for token in range(len(said), 5):
            yield wire.Delta(text=f"<{token}>", num_tokens=1, token_ids=[token])
        if not said:
            killed.append(next(worker for worker in workers if request.request_id in worker.running))
            await asyncio.Event().wait()
        yield wire.Delta(finish_reason=STOP, usage=usage(completion=5), request_done=True)

    for worker in workers:
        worker.script = script
    await rig.start_router()
    data = b""
    async with rig.client.stream("POST", path, json=body(path, stream=True)) as response:
        async for chunk in response.aiter_raw():
            data += chunk
            if b"<4>" in data and killed:
                await killed[0].kill()
    *chunks, end = events(data)
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [(it["delta"].get("content") or "") if path == CHAT else it["text"] for it in choices]
    assert "".join(texts) == "<0><1><2><3><4>" and end == "[DONE]"
    assert [it["finish_reason"] for it in choices if it["finish_reason"]] == ["stop"]
    (second,) = (worker for worker in workers if worker is not killed[0])
    assert [list(prior.token_ids) for prior in second.requests[0].prior] == [[0, 1, 2, 3, 4]]
