"""Tenants at the edges of a running router: keys, hidden models, quotas, salts, and what stays open."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from compatibility.known_worker import CHAT as CHAT_MODEL
from compatibility.known_worker import FACTS, answer
from router_rig import CHAT, COMPLETION, MODEL, Rig, body

from naru_proto.tenants import key_digest
from naru_proto.v1 import inference_pb2, inference_pb2_grpc

A, B, LIMITED, SINGLE = "nk-a", "nk-b", "nk-limited", "nk-single"
KEYS = {"authorization": f"Bearer {A}"}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.json"
    tenants = [
        {"name": "a", "keys": [key_digest(A)], "weight": 3},
        {"name": "b", "keys": [key_digest(B)], "models": ["tiny-*"]},
        {"name": "single", "keys": [key_digest(SINGLE)], "quotas": {"maxInFlight": 1}},
        {"name": "limited", "keys": [key_digest(LIMITED)], "quotas": {"requestsPerMinute": 2, "tokensPerMinute": 1000}},
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


async def started(rig: Rig, tenants_file: str, **fields: Any) -> Any:
    await rig.publish_model(**fields)
    worker = await rig.start_worker()
    await rig.start_router(tenants_file=tenants_file)
    return worker


def headers(key: str) -> dict[str, str]:
    return {"x-api-key": key}


@BOTH
async def test_without_a_key_nothing_is_asked_of_a_worker(rig: Rig, tenants_file: str, path: str) -> None:
    worker = await started(rig, tenants_file)
    for given in ({}, headers("nk-no"), {"x-tenant": "a"}):
        response = await rig.client.post(path, json=body(path), headers=given)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await rig.client.get("/v1/models", headers=given)).status_code == 401
        assert (await rig.client.get(f"/v1/models/{MODEL}", headers=given)).status_code == 401
    assert worker.requests == []
    for page in ("/health", "/ready", "/readyz", "/metrics"):
        assert (await rig.client.get(page)).status_code == 200
    assert (await rig.client.get("/readyz")).json()["tenancy"]["tenants"] == 4
    assert A not in (await rig.client.get("/metrics")).text


@BOTH
async def test_a_workers_request_says_whose_it_is_and_carries_the_tenants_salt(
    rig: Rig, tenants_file: str, path: str
) -> None:
    worker = await started(rig, tenants_file)
    text = "long enough for route keys " * 10
    asked = {"model": MODEL, "prompt": text, "messages": [{"role": "user", "content": text}]}
    del asked["messages" if path == COMPLETION else "prompt"]
    for key in (A, B, A):
        assert (await rig.client.post(path, json=asked, headers=headers(key))).status_code == 200
    first, second, third = worker.requests
    assert first.route_keys
    assert [(each.tenant, each.tenant_weight) for each in worker.requests] == [("a", 3.0), ("b", 1.0), ("a", 3.0)]
    assert first.cache_salt == third.cache_salt != second.cache_salt
    assert first.route_keys == third.route_keys != second.route_keys
    assert len(first.cache_salt) == 16


async def test_vectors_of_a_tenant_are_computed_under_its_salt(rig: Rig, tenants_file: str) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(script=answer, facts=FACTS[CHAT_MODEL])
    await rig.start_router(tenants_file=tenants_file)
    for key in (A, B, A):
        reply = await rig.client.post("/v1/embeddings", json={"model": MODEL, "input": "a"}, headers=headers(key))
        assert reply.status_code == 200
    first, second, third = (request.cache_salt for request in worker.requests)
    assert first == third != second
    assert first and second


@pytest.mark.parametrize(
    ("path", "asked", "num_jobs"),
    [
        (COMPLETION, {"prompt": ["a", "b", "c"], "max_tokens": 4}, 3),
        ("/v1/embeddings", {"input": ["x" * 1000] * 600}, 5),
        ("/v1/score", {"text_1": "a", "text_2": [f"{i}" + "x" * 1000 for i in range(600)]}, 3),
    ],
)
async def test_a_call_of_many_jobs_is_one_request_of_its_tenant(
    rig: Rig, tenants_file: str, path: str, asked: dict[str, Any], num_jobs: int
) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(script=answer, facts=FACTS[CHAT_MODEL])
    await rig.start_router(tenants_file=tenants_file)
    for _ in range(3):
        reply = await rig.client.post(path, json={"model": MODEL, **asked}, headers=headers(SINGLE))
        assert reply.status_code == 200, reply.text
    assert len(worker.requests) >= 3 * num_jobs


async def test_shared_caches_have_no_salt(rig: Rig, tenants_file: str) -> None:
    worker = await started(rig, tenants_file, cache_isolation="shared")
    for key in (A, B):
        assert (await rig.client.post(CHAT, json=body(CHAT), headers=headers(key))).status_code == 200
    assert [each.cache_salt for each in worker.requests] == [b"", b""]


@BOTH
async def test_a_hidden_model_is_not_there(rig: Rig, tenants_file: str, path: str) -> None:
    await rig.publish_model("secret", allow=("a",))
    await started(rig, tenants_file)
    await rig.publish_worker("w0", models=(MODEL, "secret"))
    asked = body(path) | {"model": "secret"}
    await rig.until(lambda: bool(rig.app.fleet.route_map.ready_workers("secret")))
    assert (await rig.client.post(path, json=asked, headers=headers(A))).status_code == 200
    hidden = await rig.client.post(path, json=asked, headers=headers(B))
    absent = await rig.client.post(path, json=body(path) | {"model": "nosuch"}, headers=headers(B))
    assert hidden.status_code == absent.status_code == 404
    assert hidden.text.replace("secret", "nosuch") == absent.text
    cards = (await rig.client.get("/v1/models", headers=headers(B))).json()["data"]
    assert [card["id"] for card in cards] == [MODEL]
    assert (await rig.client.get("/v1/models/secret", headers=headers(B))).status_code == 404
    assert (await rig.client.get("/v1/models/secret", headers=headers(A))).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_quota_refuses_with_429_and_tells_what_is_left(rig: Rig, tenants_file: str, stream: bool) -> None:
    worker = await started(rig, tenants_file)
    asked = body(CHAT) | {"stream": stream, "max_tokens": 5}
    replies = [await rig.client.post(CHAT, json=asked, headers=headers(LIMITED)) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["1", "0", "0"]
    assert {reply.headers["x-ratelimit-limit-requests"] for reply in replies} == {"2"}
    left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in replies]
    # A stream's head goes out before it is known what the answer takes: it tells what is set aside.
    assert all(900 < each < 1000 for each in left) and (stream or left[0] > left[1] == left[2])
    error = replies[2].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert 1 <= int(replies[2].headers["retry-after"]) <= 62
    assert len(worker.requests) == 2
    other = await rig.client.post(CHAT, json=asked, headers=headers(A))
    assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers


async def test_grpc_takes_the_same_keys(rig: Rig, tenants_file: str) -> None:
    await rig.publish_model("secret", allow=("a",))
    worker = await started(rig, tenants_file)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.InferenceGenerateRequest(model=MODEL, prompt="hi")
        for call in (stub.ListModels(inference_pb2.ListModelsRequest()), stub.Generate(request).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {B}"),)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
        assert [model.name for model in listed.models] == [MODEL]
        assert [reply async for reply in stub.Generate(request, metadata=metadata)]
    assert [each.tenant for each in worker.requests] == ["b"]


async def test_a_key_that_is_taken_away_works_no_longer_without_a_restart(rig: Rig, tenants_file: str) -> None:
    await started(rig, tenants_file)
    assert (await rig.client.get("/v1/models", headers=KEYS)).status_code == 200
    staged = Path(tenants_file).with_suffix(".part")
    staged.write_text('{"tenants": []}')
    staged.replace(tenants_file)
    async with asyncio.timeout(20):
        while (await rig.client.get("/v1/models", headers=KEYS)).status_code != 401:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
