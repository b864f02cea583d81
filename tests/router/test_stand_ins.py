"""Another model answers: fallbacks where the one asked for cannot be served, and splits by weight."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, events, info
from stub_worker import Script, StubWorker, fail, say
from task_worker import EMBEDDER, pool

from naru_proto import names
from naru_proto.tenants import key_digest
from naru_proto.v1 import inference_pb2, inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.embedding_request import MAX_JOB_INPUTS

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
STREAM = pytest.mark.parametrize("stream", [False, True])
SMALL, SMALLER = "small", "smaller"
LONG = "word " * 40_000


async def metric(rig: Rig, line_start: str) -> float:
    text = (await rig.client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


async def started(
    rig: Rig, then: Script | None = None, *, fallbacks: tuple[str, ...] = (SMALL,), **settings: Any
) -> StubWorker:
    """A model that no worker can have, and one that stands in for it."""
    await rig.publish_model(pools=("nowhere",), fallbacks=fallbacks)
    await rig.publish_model(SMALL)
    worker = await rig.start_worker(script=then or say("Hel", "lo"), models=(SMALL,))
    await rig.start_router(**{"model_wait_s": 0.1, **settings})
    return worker


@STREAM
@BOTH
async def test_a_model_that_stands_in_answers_under_the_name_that_was_asked(rig: Rig, path: str, stream: bool) -> None:
    worker = await started(rig)
    response = await rig.post(path, body(path, stream=stream))
    assert response.status_code == 200 and response.headers[names.HEADER_MODEL] == SMALL
    answers = events(response.content)[:-1] if stream else [response.json()]
    assert {answer["model"] for answer in answers} == {MODEL}
    assert [request.model for request in worker.requests] == [SMALL]
    assert await metric(rig, f'naru_router_fallbacks_total{{model="{MODEL}"}}') == 1


async def test_it_is_named_over_grpc_as_well(rig: Rig) -> None:
    await started(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.InferenceGenerateRequest(model=MODEL, prompt="hi")
        )
        assert "".join([reply.text async for reply in call]) == "Hello"
        assert (await call.trailing_metadata()).get(names.HEADER_MODEL) == SMALL


@STREAM
@BOTH
@pytest.mark.parametrize("code", ["service_unavailable", "model_load_failed", "context_length_exceeded"])
async def test_the_error_that_is_told_is_the_one_of_the_model_that_was_asked_for(
    rig: Rig, path: str, stream: bool, code: str
) -> None:
    await started(rig, fail(code, "no luck with the other one"), fallbacks=(SMALL, SMALLER, "unknown"))
    response = await rig.post(path, body(path, stream=stream))
    assert response.status_code == 503
    assert MODEL in response.json()["error"]["message"] and "other one" not in response.text
    assert await metric(rig, "naru_router_fallbacks_total{") == 0


@BOTH
async def test_a_prompt_that_one_cannot_take_goes_to_the_next(rig: Rig, path: str) -> None:
    await started(rig, fallbacks=(SMALL, SMALLER))
    await rig.publish_model(SMALLER)
    await rig.publish_worker("w0", models=(SMALL,), facts=info(max_model_len=100))
    next_one = await rig.start_worker("w1", models=(SMALLER,), facts=info(max_model_len=100_000))
    await rig.until(lambda: bool(rig.app.fleet.ready(SMALLER)) and _max_len(rig, SMALL) == 100)
    content = {"prompt": LONG} if path == COMPLETION else {"messages": [{"role": "user", "content": LONG}]}
    response = await rig.post(path, {"model": MODEL, **content})
    assert response.status_code == 200 and response.headers[names.HEADER_MODEL] == SMALLER
    assert len(next_one.requests) == 1 and rig.workers["w0"].requests == []


def _max_len(rig: Rig, model: str) -> int:
    found = rig.app.fleet.route_map.info(model)
    return 0 if found is None else found.max_model_len


async def test_a_stand_in_that_breaks_after_it_has_begun_says_so_itself(rig: Rig) -> None:
    async def script(request: wire.GenerateRequest) -> Any:
        yield wire.Delta(text="Hel", num_tokens=1)
        yield wire.Delta(error=wire.Error(code="internal_error", message="its engine broke"), request_done=True)

    await started(rig, script)
    *chunks, error = await rig.stream(COMPLETION, body(COMPLETION))
    assert chunks[0]["choices"][0]["text"] == "Hel" and "its engine broke" in error["error"]["message"]


@BOTH
async def test_a_model_that_is_only_busy_has_nobody_stand_in(rig: Rig, path: str) -> None:
    worker = await started(rig)
    await rig.publish_model(fallbacks=(SMALL,))
    busy = await rig.start_worker("w1", fail("rate_limit_exceeded", "full", retryable=True))
    await rig.until(lambda: bool(rig.app.fleet.ready(MODEL)))
    assert (await rig.post(path, body(path))).status_code == 429
    assert len(busy.requests) == 1 and worker.requests == []


@BOTH
async def test_a_full_waiting_room_of_a_cold_model_has_another_one_stand_in(rig: Rig, path: str) -> None:
    await started(rig, max_waiting_per_model=1)
    with rig.app.dispatcher.seat(MODEL) as seat:
        seat.take()
        response = await rig.post(path, body(path))
    assert response.status_code == 200 and response.headers[names.HEADER_MODEL] == SMALL


@BOTH
async def test_a_name_whose_target_is_not_there_is_answered_by_its_stand_in(rig: Rig, path: str) -> None:
    await started(rig)
    await rig.publish_model(target=f"{MODEL}@gone", fallbacks=(SMALL,))
    await rig.until(lambda: bool(rig.app.fleet.route_map.models[MODEL].target))
    response = await rig.post(path, body(path))
    assert response.status_code == 200 and response.headers[names.HEADER_MODEL] == SMALL


@BOTH
async def test_a_request_that_another_model_answers_is_charged_once(rig: Rig, path: str, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    quotas = {"requestsPerMinute": 3, "tokensPerMinute": 10_000}
    tenants.write_text(json.dumps({"tenants": [{"name": "a", "keys": [key_digest("nk-a")], "quotas": quotas}]}))
    await started(rig, tenants_file=str(tenants))
    left = []
    for _ in range(3):
        response = await rig.client.post(path, json=body(path), headers={"x-api-key": "nk-a"})
        assert response.status_code == 200, response.text
        left.append(int(response.headers["x-ratelimit-remaining-requests"]))
    assert left == [2, 1, 0]
    refused = await rig.client.post(path, json=body(path), headers={"x-api-key": "nk-a"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "quota_exceeded"
    assert len(rig.workers["w0"].requests) == 3


# --- splits ---------------------------------------------------------------------------------------------------------


@BOTH
async def test_a_split_shares_by_weight_and_keeps_a_session_on_its_side(rig: Rig, path: str) -> None:
    await rig.publish_model(split=((MODEL, 75), (SMALL, 25)))
    await rig.publish_model(SMALL)
    worker = await rig.start_worker(models=(MODEL, SMALL))
    await rig.start_router()

    async def ask(session: str, number: int) -> str:
        content = f"question {number}"
        asked = {"prompt": content} if path == COMPLETION else {"messages": [{"role": "user", "content": content}]}
        response = await rig.client.post(path, json={"model": MODEL, **asked}, headers={names.HEADER_SESSION: session})
        assert response.status_code == 200 and response.json()["model"] == MODEL
        return str(response.headers.get(names.HEADER_MODEL, MODEL))

    sides = {f"s{i}": await ask(f"s{i}", 0) for i in range(60)}
    counts = Counter(sides.values())
    assert set(counts) == {MODEL, SMALL} and 5 <= counts[SMALL] <= 26  # 15 of 60, three sigma
    for session in list(sides)[:12]:
        assert {await ask(session, number) for number in (1, 2)} == {sides[session]}
    assert Counter(request.model for request in worker.requests)[SMALL] >= counts[SMALL]


async def test_a_conversation_without_a_session_stays_on_its_side(rig: Rig) -> None:
    await rig.publish_model(split=((MODEL, 1), (SMALL, 1)))
    await rig.publish_model(SMALL)
    await rig.start_worker(models=(MODEL, SMALL))
    await rig.start_router()
    for start in range(6):
        messages = [{"role": "user", "content": f"conversation {start}"}]
        sides = []
        for turn in range(3):
            response = await rig.post(CHAT, {"model": MODEL, "messages": messages})
            sides.append(response.headers.get(names.HEADER_MODEL, MODEL))
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}?"}]
        assert len(set(sides)) == 1


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_a_model_of_which_nothing_is_known_has_its_vectors_made_by_its_stand_in(
    rig: Rig, path: str, fields: dict[str, Any]
) -> None:
    await rig.publish_model(pools=("nowhere",), fallbacks=(SMALL,))
    await rig.publish_model(SMALL)
    worker = await rig.start_worker(script=pool, models=(SMALL,), facts=EMBEDDER)
    await rig.start_router(model_wait_s=0.1)
    response = await rig.post(path, {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    assert response.headers[names.HEADER_MODEL] == SMALL and response.json()["model"] == MODEL
    assert {request.model for request in worker.requests} == {SMALL}


async def test_a_split_gives_all_inputs_of_a_call_to_one_model(rig: Rig) -> None:
    await rig.publish_model(split=((MODEL, 1), (SMALL, 1)))
    await rig.publish_model(SMALL)
    worker = await rig.start_worker(script=pool, models=(MODEL, SMALL), facts=EMBEDDER)
    await rig.start_router()
    sides = []
    for call in range(12):
        worker.requests.clear()
        inputs = [f"{number} of call {call}" for number in range(2 * MAX_JOB_INPUTS + 1)]
        inputs[0] = f"call {call}"
        assert (await rig.post("/v1/embeddings", {"model": MODEL, "input": inputs})).status_code == 200
        assert len(worker.requests) == 3
        (side,) = {request.model for request in worker.requests}
        sides.append(side)
    assert set(sides) == {MODEL, SMALL}


async def test_vectors_of_two_revisions_are_not_given_in_one_reply(rig: Rig) -> None:
    numbers = itertools.count()

    async def ever_newer(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        revision = f"r{next(numbers)}"
        async for delta in pool(request):
            delta.revision = revision
            yield delta

    await rig.publish_model()
    await rig.start_worker(script=ever_newer, facts=EMBEDDER)
    await rig.start_router()
    assert (await rig.post("/v1/embeddings", {"model": MODEL, "input": ["a"] * MAX_JOB_INPUTS})).status_code == 200
    response = await rig.post("/v1/embeddings", {"model": MODEL, "input": ["a"] * 2 * MAX_JOB_INPUTS})
    assert response.status_code == 503 and "two models" in response.json()["error"]["message"]
