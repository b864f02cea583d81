"""Entries that another record serves: a rollout moves their target, and no client ever sees a revision."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from router_rig import CHAT, CHATML, COMPLETION, MODEL, Rig, body, info
from stub_worker import StubWorker, fail, hang, say

from naru_proto import names
from naru_proto.errors import ModelNotFound, Unavailable
from naru_proto.registry import ModelRecord
from naru_proto.v1 import inference_pb2, inference_pb2_grpc
from naru_router.core.route_map import RouteMap

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
OLD, NEW = names.revision_name(MODEL, "aaa"), names.revision_name(MODEL, "bbb")


async def served_by(rig: Rig, revision: str, **fields: Any) -> None:
    """The entry, and the revision that serves it."""
    await rig.publish_model(revision, is_revision=True)
    await rig.publish_model(aliases=("small",), target=revision, **fields)


async def forget(rig: Rig, revision: str) -> None:
    await rig.board.hdel(names.KEY_MODELS, revision)
    await rig.board.publish(names.CHANNEL_CHANGES, "models")


async def target_is(rig: Rig, revision: str) -> None:
    await rig.until(lambda: rig.app.fleet.route_map.models[MODEL].target == revision)


@BOTH
@pytest.mark.parametrize("name", [MODEL, "small"])
async def test_a_request_is_sent_for_the_target_and_answered_under_the_name_that_was_asked(
    rig: Rig, path: str, name: str
) -> None:
    await served_by(rig, OLD)
    worker = await rig.start_worker(models=(OLD,))
    await rig.start_router()
    response = await rig.post(path, body(path) | {"model": name})
    assert response.status_code == 200 and response.json()["model"] == name
    chunks = await rig.stream(path, body(path) | {"model": name})
    assert {chunk["model"] for chunk in chunks[:-1]} == {name}
    assert [request.model for request in worker.requests] == [OLD, OLD]
    metrics = (await rig.client.get("/metrics")).text
    assert f'model="{MODEL}"' in metrics and "@" not in metrics


async def test_revisions_are_in_no_listing_and_may_not_be_asked_for(rig: Rig) -> None:
    await served_by(rig, OLD)
    await rig.publish_model(NEW, is_revision=True, aliases=("sneaky",))
    await rig.start_worker(models=(OLD, NEW))
    await rig.start_router()
    cards = (await rig.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["ready_workers"]) for card in cards] == [
        ("small", MODEL, 1), (MODEL, MODEL, 1),
    ]  # fmt: skip
    assert all(card["max_model_len"] == 2048 for card in cards)
    assert (await rig.client.get("/readyz")).json()["models"] == {MODEL: 1}
    assert (await rig.client.get(f"/v1/models/{OLD}")).status_code == 404
    for name in (OLD, "sneaky"):
        response = await rig.post(CHAT, body(CHAT) | {"model": name})
        assert response.status_code == 404 and "known models: small, tiny-a" in response.json()["error"]["message"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(m.name, list(m.aliases), m.ready_workers, m.max_model_len) for m in models] == [
        (MODEL, ["small"], 1, 2048)
    ]


@BOTH
async def test_an_entry_whose_target_is_not_there_is_503(rig: Rig, path: str) -> None:
    await rig.publish_model(target=OLD)
    await rig.start_worker(models=(OLD,))
    await rig.start_router(model_wait_s=1000.0)
    response = await rig.post(path, body(path))
    assert response.status_code == 503 and OLD in response.json()["error"]["message"]
    assert (await rig.client.get("/v1/models")).json()["data"][0]["id"] == MODEL


def test_a_target_is_followed_once() -> None:
    a, b, c = (ModelRecord(x, "file:///", 1, target=y) for x, y in (("a", "b"), ("b", "c"), ("c", "c")))
    board = RouteMap({"a": a, "b": b, "c": c})
    assert [board.resolve(name).model for name in "abc"] == [b, c, c]
    assert board.has_moved("a", "x") and not board.has_moved("a", "b") and not board.has_moved("gone", "b")
    alone = RouteMap({"a": a})
    assert not alone.has_moved("a", "x")
    with pytest.raises(Unavailable, match="'b', which is not there"):
        alone.resolve("a")
    with pytest.raises(ModelNotFound):
        alone.resolve("b")


async def holding(rig: Rig, worker: StubWorker, path: str, num: int = 1) -> list[asyncio.Task[Any]]:
    """Requests that wait on a worker for the old revision."""
    requests = [asyncio.create_task(rig.post(path, body(path))) for _ in range(num)]
    await worker.until(lambda: bool(worker.running))
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == num)
    return requests


@BOTH
async def test_requests_that_wait_on_a_worker_while_the_target_moves_are_served_by_the_new_one(
    rig: Rig, path: str
) -> None:
    await served_by(rig, OLD)
    worker = await rig.start_worker(models=(OLD,), state="loading", script=hang())
    await rig.start_router(model_wait_s=1000.0)
    requests = await holding(rig, worker, path, 3)
    worker.script = say("Hel", "lo")
    template = CHATML.replace("assistant", "helper")
    await rig.publish_worker("w0", models=(NEW,), facts=info(template))
    await served_by(rig, NEW)
    await forget(rig, OLD)
    assert [response.status_code for response in await asyncio.gather(*requests)] == [200] * 3
    served = [request for request in worker.requests if request.model == NEW]
    assert len(served) == 3
    if path == CHAT:  # and rendered for it
        assert all(request.text.endswith("helper\n") for request in served)
    assert rig.app.dispatcher.waiting.num_waiting(MODEL) == 0


@BOTH
async def test_requests_that_wait_in_the_router_while_the_target_moves_are_served_by_the_new_one(
    rig: Rig, path: str
) -> None:
    await served_by(rig, OLD)
    worker = await rig.start_worker(models=(), script=fail("model_not_found", "not known here"))
    await rig.start_router(model_wait_s=1000.0)
    request = asyncio.create_task(rig.post(path, body(path)))
    await worker.until(lambda: bool(worker.requests))
    worker.script = say("Hel", "lo")
    await rig.publish_worker("w0", models=(NEW,))
    await served_by(rig, NEW)
    assert (await request).status_code == 200
    assert worker.requests[-1].model == NEW


async def test_an_answer_that_has_begun_stays_with_its_revision(rig: Rig) -> None:
    await served_by(rig, OLD)
    worker = await rig.start_worker(models=(OLD, NEW), script=hang("tok"))
    await rig.start_router()
    request = asyncio.create_task(rig.post(CHAT, body(CHAT, stream=True)))
    await worker.until(lambda: bool(worker.running))
    await served_by(rig, NEW)
    await target_is(rig, NEW)
    worker.script = say("new")
    assert (await rig.post(CHAT, body(CHAT))).json()["choices"][0]["message"]["content"] == "new"
    assert [r.model for r in worker.requests] == [OLD, NEW] and not worker.cancelled and not request.done()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


@BOTH
async def test_a_models_own_limits_of_waiting_come_before_the_routers(rig: Rig, path: str) -> None:
    await served_by(rig, OLD, max_wait_s=0.2, max_depth=1)
    worker = await rig.start_worker(models=(OLD,), state="loading", script=hang())
    await rig.start_router(model_wait_s=1000.0)
    first = asyncio.create_task(rig.post(path, body(path)))
    await worker.until(lambda: bool(worker.running))
    second = await rig.post(path, body(path))
    assert second.status_code == 429 and repr(MODEL) in second.json()["error"]["message"]
    response = await first
    assert response.status_code == 503
    assert f"the model {MODEL!r} is still loading" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"target": 5}, {"max_wait_s": "1"}, {"max_wait_s": -1.0}, {"max_wait_s": 1e9}, {"max_depth": 1.5}]
)
async def test_an_entry_that_makes_no_sense_is_left_out(rig: Rig, fields: dict[str, Any]) -> None:
    await rig.publish_model("odd", **fields)
    await rig.publish_model()
    await rig.start_worker()
    await rig.start_router()
    assert [card["id"] for card in (await rig.client.get("/v1/models")).json()["data"]] == [MODEL]


async def test_a_worker_that_leaves_is_asked_when_no_other_has_the_model_ready(rig: Rig) -> None:
    await rig.publish_model()
    leaving = await rig.start_worker("w0", leaving=True)
    await rig.start_worker("w1", models=())
    await rig.start_router()
    assert (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].startswith("w0; ")
    await rig.publish_worker("w1")
    await rig.until(lambda: rig.app.fleet.is_ready("w1", MODEL))
    for index in range(12):
        response = await rig.post(COMPLETION, body(COMPLETION, prompt=f"{index}"))
        assert response.headers["x-naru-route"].startswith("w1; ")
    assert len(leaving.requests) == 1


async def test_a_request_is_not_held_on_a_worker_that_leaves(rig: Rig) -> None:
    await rig.publish_model()
    leaving = await rig.start_worker("w0", state="loading", leaving=True)
    other = await rig.start_worker("w1", models=())
    await rig.start_router()
    assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200
    assert (len(leaving.requests), len(other.requests)) == (0, 1)
