"""The Open Inference Protocol over HTTP: every kind of model, JSON and binary tensors, and input that lies."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

import pytest
from compatibility.known_worker import CHAT, DIMENSION, DOUBLER, EMBEDDER, FACTS
from oip_rig import HEADER, infer, infer_binary, raw, start, texts, x
from router_rig import Rig
from stub_worker import hang

ONE = struct.pack("<4f", 1, 2, 3, 4)
DOUBLED = [3.0, 5.0, 7.0, 9.0]


@pytest.fixture
async def oip(rig: Rig) -> Rig:
    """A router with models of every kind."""
    await start(rig)
    return rig


async def get(rig: Rig, path: str) -> tuple[int, Any]:
    response = await rig.client.get(path)
    return response.status_code, response.json()


async def test_health_and_server_are_told(oip: Rig) -> None:
    assert await get(oip, "/v2/health/live") == (200, {"live": True})
    assert await get(oip, "/v2/health/ready") == (200, {"ready": True})
    status, server = await get(oip, "/v2")
    assert (status, server["name"]) == (200, "naru") and "binary_tensor_data" in server["extensions"]
    oip.app.gate.is_leaving = True
    assert await get(oip, "/v2/health/ready") == (503, {"ready": False})


async def test_each_kind_of_model_tells_truly_what_it_takes(oip: Rig) -> None:
    _, doubler = await get(oip, f"/v2/models/{DOUBLER}")
    assert doubler == {
        "name": DOUBLER,
        "versions": ["1"],
        "platform": "onnxruntime",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }
    _, config = await get(oip, f"/v2/models/{DOUBLER}/versions/1/config")
    assert config["max_batch_size"] == 8 and config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]
    _, embedder = await get(oip, f"/v2/models/{EMBEDDER}")
    assert embedder["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, DIMENSION]}]
    _, chat = await get(oip, f"/v2/models/{CHAT}")
    assert chat["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
    _, config = await get(oip, f"/v2/models/{CHAT}/config")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["input"] if not each.get("optional")] == ["text_input"]


async def test_what_is_not_there_is_404_in_the_protocols_form(oip: Rig) -> None:
    for path in (
        "/v2/models/nope",
        "/v2/models/nope/ready",
        "/v2/models/nope/stats",
        f"/v2/models/{DOUBLER}/versions/2",
        f"/v2/models/{DOUBLER}/versions/2/ready",
        f"/v2/models/{DOUBLER}/nothing",
        "/v2/nothing",
    ):
        status, body = await get(oip, path)
        assert status == 404 and set(body) == {"error"} and isinstance(body["error"], str), path
    for path in ("models/nope/infer", f"models/{DOUBLER}/versions/2/infer", "repository/models/nope/load"):
        response = await oip.client.post(f"/v2/{path}", json={"inputs": [x()]})
        assert response.status_code == 404 and isinstance(response.json()["error"], str), path


async def test_a_method_that_a_path_does_not_take_is_405(oip: Rig) -> None:
    for path in ("/v2", "/v2/health/live", f"/v2/models/{DOUBLER}", f"/v2/models/{DOUBLER}/versions/1/ready"):
        for method in ("PUT", "DELETE", "POST", "OPTIONS"):
            response = await oip.client.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD"), (method, path)
            assert "error" in response.json()
        assert (await oip.client.head(path)).status_code == 200
    response = await oip.client.get(f"/v2/models/{DOUBLER}/infer")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_replies_say_where_a_call_went_and_who_stood_in(oip: Rig) -> None:
    response = await infer(oip, {"inputs": [x()]})
    assert response.headers["x-naru-route"].startswith(f"w-{DOUBLER}; ")
    await oip.publish_model("away", fallbacks=(CHAT,), max_wait_s=0.2, pools=("elsewhere",))
    await oip.until(lambda: "away" in oip.app.fleet.route_map.models)
    for path in ("generate", "generate_stream"):
        response = await oip.client.post(f"/v2/models/away/{path}", json={"text_input": "hi"})
        assert (response.status_code, response.headers["x-naru-model"]) == (200, CHAT), response.text
    reply = await infer(oip, {"inputs": [texts("text_input", "hi")]}, "away")
    assert reply.json()["outputs"][0]["data"] == ["Paris is it."] and reply.headers["x-naru-model"] == CHAT


async def test_a_model_nobody_has_loaded_is_listed_but_not_ready(oip: Rig) -> None:
    await oip.publish_model("cold", min_replicas=0, on_demand=True)
    await oip.until(lambda: "cold" in oip.app.fleet.route_map.models)
    assert await get(oip, "/v2/models/cold/ready") == (503, {"name": "cold", "ready": False})
    status, body = await get(oip, "/v2/models/cold")
    assert status == 503 and "once a worker has loaded it" in body["error"]
    listed = (await oip.client.post("/v2/repository/index")).json()
    assert [(each["name"], each["state"]) for each in listed] == [
        ("cold", "UNAVAILABLE"),
        *((name, "READY") for name in sorted(FACTS)),
    ]
    ready = (await oip.client.post("/v2/repository/index", json={"ready": True})).json()
    assert [each["name"] for each in ready] == sorted(FACTS)


async def test_tensors_in_json_flat_or_nested(oip: Rig) -> None:
    for data in ([1, 2, 3, 4], [[1, 2, 3, 4.0]]):
        reply = (await infer(oip, {"id": "a1", "inputs": [x(data=data)], "outputs": [{"name": "y"}]})).json()
        assert (reply["model_name"], reply["model_version"], reply["id"]) == (DOUBLER, "1", "a1")
        assert reply["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": DOUBLED}]
    reply = (
        await oip.client.post(f"/v2/models/{DOUBLER}/versions/1/infer", json={"inputs": [x([2, 4], [0] * 8)]})
    ).json()
    assert reply["outputs"][0]["shape"] == [2, 4] and "id" not in reply


async def test_binary_tensors_in_and_out(oip: Rig) -> None:
    body = {"inputs": [raw(16)], "parameters": {"binary_data_output": True}}
    response = await infer_binary(oip, body, ONE)
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[HEADER])
    head = json.loads(response.content[:length])
    assert head["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    ]
    assert response.content[length:] == struct.pack("<4f", *DOUBLED)


async def test_an_outputs_own_word_on_binary_data_wins(oip: Rig) -> None:
    for asked, all_binary, is_binary in ((False, True, False), (True, False, True), (None, False, False)):
        output = {"name": "y"} | ({} if asked is None else {"parameters": {"binary_data": asked}})
        body = {"inputs": [x()], "outputs": [output], "parameters": {"binary_data_output": all_binary}}
        response = await infer(oip, body)
        assert (HEADER in response.headers) == is_binary
        if not is_binary:
            assert response.json()["outputs"][0]["data"] == DOUBLED


async def test_compressed_bodies_are_unpacked_within_the_limit(oip: Rig) -> None:
    body = json.dumps({"inputs": [x()]}).encode()
    path = f"/v2/models/{DOUBLER}/infer"
    for name, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        response = await oip.client.post(path, content=packed, headers={"content-encoding": name})
        assert response.json()["outputs"][0]["data"] == DOUBLED
    bomb = gzip.compress(b" " * (9 * 1024 * 1024))
    for name, packed in (("gzip", bomb), ("gzip", b"xx"), ("gzip", gzip.compress(body)[:-4]), ("br", body)):
        response = await oip.client.post(path, content=packed, headers={"content-encoding": name})
        assert response.status_code == 400 and response.json()["error"], name


BAD: list[tuple[Any, str]] = [
    ({}, "inputs"),
    ({"inputs": []}, "inputs"),
    ({"inputs": {}}, "inputs"),
    ({"inputs": [1]}, "inputs[0]"),
    ({"inputs": [x()] * 300}, "256"),
    ({"inputs": [x(), x()]}, "twice"),
    ({"inputs": [{**x(), "name": "z"}]}, "'z'"),
    ({"inputs": [{**x(), "name": 3}]}, "name"),
    ({"inputs": [x(datatype="FLOAT")]}, "datatype"),
    ({"inputs": [x(datatype="INT64")]}, "takes FP32"),
    ({"inputs": [x(datatype=None)]}, "datatype"),
    ({"inputs": [x(datatype="BF16")]}, "BF16"),
    ({"inputs": [x(shape=[4])]}, "shape"),
    ({"inputs": [x(shape=[2, 2])]}, "shape"),
    ({"inputs": [x(shape=[-1, 4])]}, "shape"),
    ({"inputs": [x(shape=[1, 4.0])]}, "shape"),
    ({"inputs": [x(shape=[1] * 40)]}, "shape"),
    ({"inputs": [x(shape=[2**62, 2**62])]}, "elements"),
    ({"inputs": [x(shape=[2**64, 4])]}, "shape"),
    ({"inputs": [x(shape="1,4")]}, "shape"),
    ({"inputs": [x(data=[1, 2, 3])]}, "3 elements"),
    ({"inputs": [x(data=[1, 2, 3, "4"])]}, "'4'"),
    ({"inputs": [x(data=[1, 2, 3, True])]}, "true"),
    ({"inputs": [x(data=[1, 2, 3, None])]}, "null"),
    ({"inputs": [x(data=[1, 2, 3, 1e39])]}, "FP32"),
    ({"inputs": [x(data=[[1, 2], [3]])]}, "nested"),
    ({"inputs": [x(data=[[1, 2], 3, 4])]}, "nested"),
    ({"inputs": [x(data="abcd")]}, "array"),
    ({"inputs": [x(data=None)]}, "data"),
    ({"inputs": [x([9, 4], [0] * 36)]}, "batch of 9"),
    ({"inputs": [x([0, 4], [])]}, "batch of 0"),
    ({"inputs": [x()], "outputs": [{"name": "z"}]}, "'z'"),
    ({"inputs": [x()], "outputs": [{"name": "y"}, {"name": "y"}]}, "twice"),
    ({"inputs": [x()], "outputs": [{"name": "y", "parameters": {"classification": 2}}]}, "classification"),
    ({"inputs": [x()], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "binary_data"),
    ({"inputs": [x()], "outputs": 7}, "outputs"),
    ({"inputs": [x()], "parameters": []}, "parameters"),
    ({"inputs": [x()], "parameters": {"sequence_id": 5}}, "sequence_id"),
    ({"inputs": [x()], "parameters": {"priority": 5}}, "x-naru-priority"),
    ({"inputs": [x()], "parameters": {"timeout": -5}}, "timeout"),
    ({"inputs": [x()], "parameters": {"binary_data_output": "yes"}}, "binary_data_output"),
    ({"inputs": [x(parameters={"shared_memory_region": "r"})]}, "shared memory"),
    ({"inputs": [x(parameters={"binary_data_size": 0})]}, "one of them"),
    ({"inputs": [x()], "id": 7}, "id"),
    ({"inputs": [x()], "id": "i" * 300}, "id"),
]


async def test_bad_json_is_refused_before_any_worker_is_asked(oip: Rig) -> None:
    for body, says in BAD:
        response = await infer(oip, body)
        assert response.status_code == 400, (body, response.text)
        assert set(response.json()) == {"error"} and says in response.json()["error"], (body, response.text)
    for content in (b"{", b"[]", b'{"inputs": [NaN]}', b"\xff", b'{"a":1,"a":2}', b"[" * 100_000, b""):
        response = await oip.client.post(f"/v2/models/{DOUBLER}/infer", content=content)
        assert response.status_code == 400 and response.json()["error"], content[:20]
    assert oip.workers[f"w-{DOUBLER}"].requests == []


async def test_binary_data_that_lies_is_refused(oip: Rig) -> None:
    good = {"inputs": [raw(16)]}
    tail: list[tuple[Any, bytes, Any]] = [
        (good, ONE, 10**6),
        (good, ONE, 0),
        (good, ONE, -1),
        (good, ONE, "many"),
        (good, ONE, 5),
        (good, ONE[:15], None),
        (good, ONE + b"x", None),
        (good, b"", None),
        ({"inputs": [raw(12)]}, ONE[:12], None),
        ({"inputs": [raw(2**40)]}, ONE, None),
        ({"inputs": [raw(-16)]}, ONE, None),
        ({"inputs": [raw(16, [2**31, 2**31])]}, ONE, None),
        ({"inputs": [x()]}, ONE, None),
    ]
    for body, binary, length in tail:
        response = await infer_binary(oip, body, binary, length=length)
        assert response.status_code == 400 and response.json()["error"], (body, length, response.text)
    broken = {"name": "text", "shape": [1], "datatype": "BYTES"}
    for data in (
        struct.pack("<I", 2**31) + b"hi",
        b"\1\0\0",
        struct.pack("<I", 2) + b"hi" * 2,
        struct.pack("<I", 1) + b"\xff",
    ):
        body = {"inputs": [{**broken, "parameters": {"binary_data_size": len(data)}}]}
        response = await infer_binary(oip, body, data, model=EMBEDDER)
        assert response.status_code == 400 and response.json()["error"], data
    assert all(worker.requests == [] for worker in oip.workers.values())


async def test_a_number_that_is_none_passes_in_binary_data_and_is_null_in_json(oip: Rig) -> None:
    data = struct.pack("<4f", float("nan"), float("inf"), 0, 0)
    reply = (await infer_binary(oip, {"inputs": [raw(16)]}, data)).json()
    assert reply["outputs"][0]["data"] == [None, None, 1, 1]


async def test_timeout_parameter_ends_a_call(oip: Rig) -> None:
    oip.workers[f"w-{DOUBLER}"].script = hang()
    response = await infer(oip, {"inputs": [x()], "parameters": {"timeout": 1000}})
    assert response.status_code == 504 and response.json()["error"]


async def test_calls_are_counted_by_model(oip: Rig) -> None:
    await infer(oip, {"inputs": [x([2, 4], [0] * 8)]})
    await infer(oip, {"inputs": [x(datatype="INT64")]})
    _, body = await get(oip, f"/v2/models/{DOUBLER}/stats")
    (stats,) = body["model_stats"]
    assert (stats["name"], stats["inference_count"], stats["execution_count"]) == (DOUBLER, 2, 1)
    assert stats["inference_stats"]["success"]["count"] == stats["inference_stats"]["fail"]["count"] == 1
    assert stats["inference_stats"]["success"]["ns"] > 0 and stats["last_inference"] > 0
    _, body = await get(oip, "/v2/models/stats")
    assert [each["name"] for each in body["model_stats"]] == sorted(FACTS)
