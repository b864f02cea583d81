"""Models loaded and unloaded over the Open Inference Protocol: what is asked of workers, and who may not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cold_worker import ColdWorker
from compatibility.known_worker import DOUBLER, FACTS, answer
from oip_rig import x
from router_rig import MODEL, Rig, simple
from stub_worker import fail

from naru_proto.errors import Unavailable
from naru_proto.tenants import key_digest
from naru_proto.v1 import open_inference_pb2 as oip
from naru_proto.v1 import open_inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire

LOAD = f"/v2/repository/models/{MODEL}/load"
UNLOAD = f"/v2/repository/models/{MODEL}/unload"


async def test_load_brings_a_cold_model_up_and_waits_for_it(rig: Rig) -> None:
    await rig.publish_model(on_demand=True, min_replicas=0)
    worker = ColdWorker(rig)
    await worker.start("w0")
    await rig.start_router()
    worker.may_load.clear()
    loads = [asyncio.create_task(rig.client.post(LOAD)) for _ in range(3)]
    await worker.stub.until(lambda: worker.num_loads == 1)
    assert not any(load.done() for load in loads)
    worker.may_load.set()
    assert [(await load).json() for load in loads] == [{"name": MODEL, "load": True}] * 3
    assert worker.num_loads == 1
    await rig.until(lambda: bool(rig.app.fleet.ready(MODEL)))
    assert (await rig.client.post(LOAD)).status_code == 200
    assert worker.num_loads == 1
    assert (await rig.client.get(f"/v2/models/{MODEL}/ready")).status_code == 200


class ColdDoubler(ColdWorker):
    """Holds a model that generates nothing, and says so as real workers do."""

    async def show(self, state: str = "", **fields: Any) -> None:
        await super().show(state, facts=FACTS[DOUBLER], **fields)

    async def _answer(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await asyncio.shield(self._begin())
        refusal = fail("invalid_request_error", "it takes tensors only")
        async for delta in (answer if request.WhichOneof("task") else refusal)(request):
            yield delta


async def test_a_cold_model_that_generates_nothing_comes_up_for_its_first_call(rig: Rig) -> None:
    await rig.publish_model(on_demand=True, min_replicas=0)
    worker = ColdDoubler(rig)
    await worker.start("w0")
    await rig.start_router()
    body = {"inputs": [x()]}
    calls = [rig.client.post(f"/v2/models/{MODEL}/infer", json=body), rig.client.post(LOAD)]
    reply, load = await asyncio.gather(*calls)
    assert reply.json()["outputs"][0]["data"] == [3, 5, 7, 9] and load.status_code == 200
    assert worker.num_loads == 1


async def test_a_load_that_fails_or_takes_too_long_says_why(rig: Rig) -> None:
    await rig.publish_model(on_demand=True, min_replicas=0)
    worker = ColdWorker(rig)
    await worker.start("w0")
    await rig.start_router(model_wait_s=1.0)
    worker.may_load.clear()
    response = await rig.client.post(LOAD, headers={"x-naru-timeout": "0.2"})
    assert response.status_code == 503 and "still loading" in response.json()["error"]
    worker.refusal = "model_load_failed"
    worker.may_load.set()
    response = await rig.client.post(LOAD)
    assert response.status_code in (424, 503) and response.json()["error"]


async def test_a_model_is_configured_by_its_deployment_not_by_a_load(rig: Rig) -> None:
    await simple(rig)
    bad: list[Any] = [{"config": "{}"}, {"file:1/model.onnx": "AAAA"}, [], "x"]
    for parameters in bad:
        response = await rig.client.post(LOAD, json={"parameters": parameters})
        assert response.status_code == 400 and "parameters" in response.json()["error"]


async def test_unload_moves_idle_copies_off_and_waits_until_it_is_seen(rig: Rig) -> None:
    await rig.publish_model(min_replicas=0)
    worker = await rig.start_worker()
    await rig.start_router()

    async def move(request: wire.MoveRequest) -> wire.MoveReply:
        await rig.publish_worker("w0", models=())
        return wire.MoveReply(state=wire.MODEL_STATE_DRAINING)

    worker.on_move = move
    response = await rig.client.post(UNLOAD)
    assert (response.status_code, response.json()) == (200, {"name": MODEL, "unload": True})
    (told,) = worker.moves
    assert (told.model, told.tier, told.only_if_idle) == (MODEL, wire.TIER_COLD, True)
    assert (await rig.client.get(f"/v2/models/{MODEL}/ready")).status_code == 503
    assert (await rig.client.post(UNLOAD)).status_code == 200
    assert len(worker.moves) == 1


async def test_a_busy_copy_stays(rig: Rig) -> None:
    await rig.publish_model(min_replicas=0)
    worker = await rig.start_worker()
    await rig.start_router()

    async def refuse(request: wire.MoveRequest) -> wire.MoveReply:
        raise Unavailable("it has 2 requests in flight")

    worker.on_move = refuse
    response = await rig.client.post(UNLOAD)
    assert response.status_code == 503 and "2 requests in flight" in response.json()["error"]


@pytest.mark.parametrize(
    ("fields", "says"), [({"min_replicas": 1}, "replicas.min"), ({"policy": "pinned", "min_replicas": 0}, "pinned")]
)
async def test_what_would_be_brought_back_is_not_unloaded(rig: Rig, fields: dict[str, Any], says: str) -> None:
    await rig.publish_model(**fields)
    worker = await rig.start_worker()
    await rig.start_router()
    response = await rig.client.post(UNLOAD)
    assert response.status_code == 400 and says in response.json()["error"]
    assert worker.moves == []


async def test_a_tenant_unloads_only_what_it_alone_may_use(rig: Rig, tmp_path: Path) -> None:
    tenants = [{"name": name, "keys": [key_digest(f"nk-{name}")]} for name in ("a", "b")]
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    await rig.publish_model(min_replicas=0)
    await rig.publish_model("own", min_replicas=0, allow=("a",))
    worker = await rig.start_worker(models=(MODEL, "own"))
    await rig.start_router(tenants_file=str(path))

    async def move(request: wire.MoveRequest) -> wire.MoveReply:
        await rig.publish_worker("w0", models=())
        return wire.MoveReply()

    worker.on_move = move

    async def unload(model: str, key: str) -> int:
        headers = {"x-api-key": key} if key else {}
        return (await rig.client.post(f"/v2/repository/models/{model}/unload", headers=headers)).status_code

    assert await unload(MODEL, "") == 401
    assert await unload(MODEL, "nk-a") == 400
    assert await unload("own", "nk-b") == 404, "hidden"
    assert worker.moves == []
    assert await unload("own", "nk-a") == 200
    listed = await rig.client.post("/v2/repository/index", headers={"x-api-key": "nk-b"})
    assert [each["name"] for each in listed.json()] == [MODEL]
    for page in (f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/ready", "/v2/models/stats"):
        assert (await rig.client.get(page)).status_code == 401
        assert "error" in (await rig.client.get(page)).json()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        for call, request in (
            (stub.RepositoryIndex, oip.RepositoryIndexRequest()),
            (stub.ModelReady, oip.ModelReadyRequest(name=MODEL)),
            (stub.ModelInfer, oip.ModelInferRequest(model_name=MODEL)),
            (stub.RepositoryModelUnload, oip.RepositoryModelUnloadRequest(model_name="own")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        key = (("x-api-key", "nk-b"),)
        index = await stub.RepositoryIndex(oip.RepositoryIndexRequest(), metadata=key)
        assert [each.name for each in index.models] == [MODEL]


async def test_load_and_unload_over_grpc(rig: Rig) -> None:
    worker = await simple(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name=MODEL))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(model_name=MODEL))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "replicas.min" in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="nope"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert worker.moves == []
