"""Workers that fail, vanish, load, drain or lie about what they hold; Redis that goes away; clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, events, simple
from stub_worker import STOP, Script, StubWorker, fail, hang, play, say, usage

from naru_proto import names
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters import worker_calls

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
STREAM = pytest.mark.parametrize("stream", [False, True])


async def two_workers(rig: Rig, path: str, script: Script, then: Script | None = None) -> list[StubWorker]:
    """Two workers of one model with a script each; the one this endpoint's smallest body goes to comes first."""
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{i}") for i in range(2)]
    await rig.start_router()
    response = await rig.post(path, body(path))
    first = response.headers["x-naru-route"].split(";")[0]
    workers.sort(key=lambda w: w.worker_id != first)
    for worker in workers:
        worker.requests.clear()
    workers[0].script = script
    workers[1].script = then or say("Hel", "lo")
    return workers


def content(path: str, response: httpx.Response, stream: bool) -> str:
    if not stream:
        choice = response.json()["choices"][0]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])
    choices = [e["choices"][0] for e in events(response.content)[:-1]]
    return "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in choices)


async def metric(rig: Rig, line_start: str) -> float:
    text = (await rig.client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


@STREAM
@BOTH
@pytest.mark.parametrize("code", ["service_unavailable", "rate_limit_exceeded", "internal_error", "model_not_found"])
async def test_a_failure_before_the_first_byte_is_served_elsewhere(
    rig: Rig, path: str, stream: bool, code: str
) -> None:
    first, second = await two_workers(rig, path, fail(code, retryable=code != "model_not_found"))
    response = await rig.post(path, body(path, stream=stream))
    assert response.status_code == 200 and content(path, response, stream) == "Hello"
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert response.headers["x-naru-route"].startswith(second.worker_id)
    assert await metric(rig, "naru_router_retries_total{") == 1


async def test_a_worker_that_let_the_model_go_is_not_asked_again(rig: Rig) -> None:
    first, second = await two_workers(rig, COMPLETION, fail("model_not_found", "not loaded"))
    for _ in range(3):
        assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200
    assert (len(first.requests), len(second.requests)) == (1, 3)


async def test_a_model_nobody_holds_any_more_is_503_and_no_404(rig: Rig) -> None:
    await simple(rig, fail("model_not_found", "not loaded"), model_wait_s=0.3)
    response = await rig.post(CHAT, body(CHAT))
    assert response.status_code == 503 and response.headers["retry-after"]
    assert response.json()["error"]["code"] == "service_unavailable"


@STREAM
async def test_a_failure_is_tried_elsewhere_only_once(rig: Rig, stream: bool) -> None:
    await rig.publish_model()
    workers = [
        await rig.start_worker(f"w{i}", fail("service_unavailable", "full of work", retryable=True)) for i in range(3)
    ]
    await rig.start_router()
    response = await rig.post(CHAT, body(CHAT, stream=stream))
    assert response.status_code == 503 and "full of work" in response.json()["error"]["message"]
    assert sum(len(w.requests) for w in workers) == 2


async def test_a_refusal_is_not_tried_elsewhere(rig: Rig) -> None:
    refusal = fail("invalid_request_error", "logit_bias has token id 99999999", param="logit_bias")
    _, second = await two_workers(rig, COMPLETION, refusal)
    response = await rig.post(COMPLETION, body(COMPLETION))
    assert response.status_code == 400 and response.json()["error"]["param"] == "logit_bias"
    assert second.requests == []


@STREAM
@BOTH
async def test_requests_of_a_killed_worker_without_a_byte_are_served_elsewhere(
    rig: Rig, path: str, stream: bool
) -> None:
    first, second = await two_workers(rig, path, hang())
    requests = [asyncio.create_task(rig.post(path, body(path, stream=stream))) for _ in range(2)]
    await first.until(lambda: bool(first.running))  # the second one may go where nothing waits
    await first.kill()
    for request in requests:
        assert content(path, await request, stream) == "Hello"
    assert len(second.requests) == 2


@BOTH
async def test_a_stream_that_has_begun_ends_with_an_error_event(rig: Rig, path: str) -> None:
    first, second = await two_workers(rig, path, hang("Hel"))
    async with rig.client.stream("POST", path, json=body(path, stream=True)) as response:
        assert response.status_code == 200
        data = b""
        async for chunk in response.aiter_raw():
            data += chunk
            if b"Hel" in data and first.running:
                await first.kill()
    *chunks, error = events(data)
    assert set(error) == {"error"} and error["error"]["code"] == "service_unavailable"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert second.requests == []


async def test_the_official_client_raises_on_a_broken_stream(rig: Rig) -> None:
    deltas = [wire.Delta(text="Hel", num_tokens=1)]
    deltas += [wire.Delta(error=wire.Error(code="internal_error", message="the engine broke"), request_done=True)]
    await simple(rig, play(deltas))
    url = f"http://127.0.0.1:{rig.app.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the engine broke"):
            async for _ in stream:
                pass
        await stream.close()


async def test_a_whole_answer_is_served_elsewhere_though_half_of_it_had_come(rig: Rig) -> None:
    first, _ = await two_workers(rig, CHAT, hang("half"))
    request = asyncio.create_task(rig.post(CHAT, body(CHAT)))
    await first.until(lambda: len(first.running) == 1)
    await first.kill()
    assert content(CHAT, await request, False) == "Hello"


@STREAM
async def test_the_only_worker_lost_and_not_back_in_time_is_a_plain_503(rig: Rig, stream: bool) -> None:
    worker = await simple(rig, hang(), model_wait_s=0.3)
    request = asyncio.create_task(rig.post(CHAT, body(CHAT, stream=stream)))
    await worker.until(lambda: len(worker.running) == 1)
    await worker.kill()
    response = await request
    assert response.status_code == 503 and response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    "deltas",
    [
        [wire.Delta(text="x", request_done=True)],
        [wire.Delta(index=7, text="x", finish_reason=STOP, request_done=True)],
        [wire.Delta(index=-1, text="x", finish_reason=STOP, request_done=True)],
        [wire.Delta(finish_reason=STOP), wire.Delta(finish_reason=STOP, request_done=True)],
    ],
    ids=["unfinished", "index above n", "index below 0", "finished twice"],
)
async def test_a_worker_that_breaks_the_protocol_is_our_error(rig: Rig, deltas: list[wire.Delta]) -> None:
    await simple(rig, play(deltas))
    for path in (CHAT, COMPLETION):
        response = await rig.post(path, body(path))
        assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
        assert b"[DONE]" not in (await rig.post(path, body(path, stream=True))).content


@STREAM
@BOTH
async def test_a_client_that_leaves_is_cancelled_on_the_worker(rig: Rig, path: str, stream: bool) -> None:
    worker = await simple(rig, hang("tok") if stream else hang())
    requests = [asyncio.create_task(rig.post(path, body(path, stream=stream))) for _ in range(20)]
    await worker.until(lambda: len(worker.running) == 20)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await worker.until(lambda: not worker.running, timeout_s=5)
    assert sorted(worker.cancelled) == sorted(r.request_id for r in worker.requests)
    await rig.until(lambda: rig.app.gate.num_inside == 0)
    assert await metric(rig, "naru_router_requests_in_flight{") == 0


async def test_a_request_that_was_never_sent_is_taken_back(rig: Rig) -> None:
    worker = await simple(rig)
    link, _ = rig.app.fleet.link("w0")
    unsent, sent = (link.submit(wire.GenerateRequest(model=MODEL, text=t)) for t in ("unsent", "sent"))
    link.release(unsent)
    await sent.pour(lambda deltas: None)
    assert [r.text for r in worker.requests] == ["sent"] and worker.cancelled == []
    link.release(sent)


async def test_a_worker_that_sends_garbage_costs_its_own_requests_only(rig: Rig) -> None:
    async def garbage(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in frames:
            yield b"\xff\xff\xff"

    worker = await simple(rig)
    await worker.kill()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {"Exchange": grpc.stream_stream_rpc_method_handler(garbage)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("naru.v1.Worker", handlers),))
    server.add_insecure_port(f"127.0.0.1:{worker.port}")
    await server.start()
    await rig.until(lambda: rig.app.fleet.num_up() == 1)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 503
    await server.stop(None)
    await worker.start(worker.port)
    await rig.until(lambda: rig.app.fleet.num_up() == 1)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200


async def test_all_prompts_of_a_call_are_cancelled_together(rig: Rig) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        if request.text == "bad":
            await worker.until(lambda: len(worker.running) == 3)
            yield wire.Delta(error=wire.Error(code="invalid_request_error", message="no"), request_done=True)
            return
        await asyncio.Event().wait()

    worker = await simple(rig, script)
    response = await rig.post(COMPLETION, body(COMPLETION, prompt=["a", "bad", "c"]))
    assert response.status_code == 400
    await worker.until(lambda: not worker.running)
    assert len(worker.cancelled) == 2


async def test_a_request_waits_for_a_model_that_is_loading(rig: Rig) -> None:
    await rig.publish_model()
    await rig.start_worker(state="loading")
    await rig.start_router(wait_for=1)
    request = asyncio.create_task(rig.post(CHAT, body(CHAT)))
    await rig.until(lambda: rig.app.gate.num_inside == 1)
    await rig.publish_worker("w0")
    assert (await request).status_code == 200


async def test_the_wait_for_a_loading_model_has_an_end(rig: Rig) -> None:
    await rig.publish_model()
    await rig.start_worker(state="fetching", script=hang())
    await rig.start_router(model_wait_s=0.1)
    response = await rig.post(CHAT, body(CHAT))
    assert response.status_code == 503 and "still loading" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("fields", [{"draining": True}, {"models": ("other",), "pool": "another"}])
async def test_a_model_no_worker_can_serve_is_waited_for_and_then_503(rig: Rig, fields: dict[str, Any]) -> None:
    await rig.publish_model(pools=("default",))
    await rig.start_worker(**fields)
    await rig.start_router(model_wait_s=0.3)
    response = await rig.post(CHAT, body(CHAT))
    assert response.status_code == 503 and "no worker holds" in response.json()["error"]["message"]
    request = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 1)
    await rig.start_worker("successor")
    assert (await request).status_code == 200


async def test_requests_wait_for_the_only_worker_that_died_to_come_back(rig: Rig) -> None:
    worker = await simple(rig, model_wait_s=30.0)
    await worker.kill()
    await rig.board.delete(names.key_worker("w0"))
    await rig.board.publish(names.CHANNEL_CHANGES, "worker:w0")
    await rig.until(lambda: not rig.app.fleet.route_map.workers)
    requests = [asyncio.create_task(rig.post(path, body(path))) for path in (CHAT, COMPLETION)]
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 2)
    await worker.start()
    await rig.publish_worker("w0", epoch="e2", models=())  # it has not been told of the model yet
    worker.script = fail("model_not_found", "not known here")
    await worker.until(lambda: len(worker.requests) == 2)
    worker.script = say("Hel", "lo")
    await rig.publish_worker("w0", epoch="e2")
    assert [response.status_code for response in await asyncio.gather(*requests)] == [200, 200]


@BOTH
async def test_a_model_that_failed_to_load_is_503_with_the_workers_reason(rig: Rig, path: str) -> None:
    await rig.publish_model()
    refusal = fail("service_unavailable", "weights are cut; tried again in 9 s", retryable=True)
    await rig.start_worker(script=refusal, state="failed", error="weights are cut")
    await rig.start_router(model_wait_s=1000)
    response = await rig.post(path, body(path))
    assert response.status_code == 503 and "tried again in 9 s" in response.json()["error"]["message"]


async def test_a_worker_whose_lease_ends_takes_no_more_requests(rig: Rig) -> None:
    await rig.publish_model()
    await rig.start_worker("gone", say("old"), lease_s=0.3)
    await rig.start_worker("stays", say("new"))
    await rig.start_router(wait_for=1, registry_poll_s=0.05)
    await rig.until(lambda: "gone" not in rig.app.fleet.route_map.workers, timeout_s=5)
    for i in range(8):
        answer = await rig.post(COMPLETION, body(COMPLETION, prompt=f"{i}"))
        assert answer.json()["choices"][0]["text"] == "new"
    assert 'worker="gone"' not in (await rig.client.get("/metrics")).text


async def test_an_open_stream_outlives_its_workers_lease(rig: Rig) -> None:
    release = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(text="a", num_tokens=1)
        await release.wait()
        yield wire.Delta(text="b", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)

    await simple(rig, script, registry_poll_s=0.05)
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await rig.until(lambda: rig.app.gate.num_inside == 1)
    await rig.workers["w0"].until(lambda: bool(rig.workers["w0"].requests))
    await rig.board.delete(names.key_worker("w0"))
    await rig.until(lambda: not rig.app.fleet.route_map.workers)
    release.set()
    assert (await request)[-1] == "[DONE]"


async def test_an_open_stream_of_a_mute_worker_without_a_lease_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "PROBE_TIMEOUT_S", 0.1)
    worker = await simple(rig, hang("a"), registry_poll_s=0.05)
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await worker.until(lambda: bool(worker.running))
    worker.is_mute = True
    await rig.board.delete(names.key_worker("w0"))
    assert (await request)[-1]["error"]["code"] == "service_unavailable"


async def test_a_restarted_worker_is_found_again(rig: Rig) -> None:
    worker = await simple(rig)
    await worker.kill()
    await rig.until(lambda: rig.app.fleet.num_up() == 0)
    request = asyncio.create_task(rig.post(CHAT, body(CHAT)))
    await worker.start(worker.port)
    await rig.publish_worker("w0", epoch="e2")
    assert (await request).status_code == 200
