"""Texts over the Open Inference Protocol: vectors, scores, and generation by infer, generate and generate_stream."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from compatibility.known_worker import CHAT, DIMENSION, DOUBLER, EMBEDDER, RANKER
from oip_rig import infer, infer_binary, start, texts, x
from router_rig import Rig
from stub_worker import fail

from naru_proto.v1 import worker_pb2 as wire


@pytest.fixture
async def oip(rig: Rig) -> Rig:
    """A router with models of every kind."""
    await start(rig)
    return rig


async def test_texts_become_vectors_and_scores(oip: Rig) -> None:
    reply = (await infer(oip, {"inputs": [texts("text", "a", "b")]}, EMBEDDER)).json()
    (output,) = reply["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [2, DIMENSION])
    assert output["data"] == [0.5] * DIMENSION + [1.5] * DIMENSION
    sent = oip.workers[f"w-{EMBEDDER}"].requests[0].pooling
    assert [each.text for each in sent.inputs] == ["a", "b"] and sent.kind == wire.POOLING_KIND_EMBED
    body = {"inputs": [texts("text", "a")], "parameters": {"dimensions": 2}}
    assert (await infer(oip, body, EMBEDDER)).json()["outputs"][0]["shape"] == [1, 2]
    body["parameters"] = {"dimensions": DIMENSION + 1}
    assert (await infer(oip, body, EMBEDDER)).status_code == 400
    both = {"inputs": [texts("text", "q", "q"), texts("text_pair", "a", "b")]}
    reply = (await infer(oip, both, RANKER)).json()
    assert reply["outputs"] == [{"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, 1.5]}]
    assert [each.pair for each in oip.workers[f"w-{RANKER}"].requests[0].pooling.inputs] == ["a", "b"]
    for inputs in ([texts("text", "q")], [texts("text", "q"), texts("text_pair", "a", "b")], [x()]):
        assert (await infer(oip, {"inputs": inputs}, RANKER)).status_code == 400


def option(name: str, datatype: str, *values: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": datatype, "data": list(values)}


async def test_infer_generates_text_by_tensors_or_parameters(oip: Rig) -> None:
    inputs = [
        texts("text_input", "one", "two"),
        option("max_tokens", "INT32", 7),
        option("temperature", "FP32", 0.5, 0.5),
        option("seed", "UINT64", 2**63),
        option("stop_words", "BYTES", "x", "yz"),
    ]
    reply = (await infer(oip, {"inputs": inputs, "parameters": {"top_k": 3}}, CHAT)).json()
    outputs = {each["name"]: each for each in reply["outputs"]}
    assert outputs["text_output"]["data"] == ["Paris is it."] * 2 and outputs["finish_reason"]["data"] == ["stop"] * 2
    assert outputs["prompt_tokens"]["data"] == [5, 5] and outputs["completion_tokens"]["datatype"] == "INT32"
    first, second = oip.workers[f"w-{CHAT}"].requests
    assert {first.text, second.text} == {"one", "two"}
    sampling = first.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 2**63)
    assert list(sampling.stop) == ["x", "yz"] and sampling.top_k == 3
    body: dict[str, Any] = {
        "inputs": [{**texts("text_input", "hi"), "shape": [1, 1]}],
        "outputs": [{"name": "text_output"}],
    }
    body["inputs"] += [option("exclude_input_in_output", "BOOL", False)]
    body["inputs"] += [option("sampling_parameters", "BYTES", '{"max_tokens": 3, "n": 1}')]
    (output,) = (await infer(oip, body, CHAT)).json()["outputs"]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": ["hiParis is it."]}
    assert oip.workers[f"w-{CHAT}"].requests[-1].sampling.max_tokens == 3


async def test_bad_text_calls_are_refused(oip: Rig) -> None:
    text = texts("text_input", "hi")
    bad: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "inputs"),
        ([option("max_tokens", "INT32", 1)], {}, "text_input"),
        ([text, x()], {}, "'x'"),
        ([option("text_input", "INT32", 1)], {}, "BYTES"),
        ([{**text, "shape": [1, 1, 1]}], {}, "shape"),
        ([{**text, "shape": [0], "data": []}], {}, "shape"),
        ([text, option("max_tokens", "INT32", -1)], {}, "max_tokens"),
        ([text, option("max_tokens", "BYTES", "many")], {}, "max_tokens"),
        ([text, option("max_tokens", "INT32", 1, 2)], {}, "unequal"),
        ([text, option("temperature", "FP32")], {}, "temperature"),
        ([text, option("stream", "BOOL", True)], {}, "generate_stream"),
        ([text, option("stream", "INT32", 1)], {}, "stream"),
        ([text, option("sampling_parameters", "BYTES", "[]")], {}, "object"),
        ([text], {"n": 2}, "n is not 1"),
        ([text], {"top_p": 7}, "top_p"),
        ([text], {"response_format": {"type": "yaml"}}, "response_format"),
    ]
    for inputs, parameters, says in bad:
        response = await infer(oip, {"inputs": inputs, "parameters": parameters}, CHAT)
        assert response.status_code == 400 and says in response.json()["error"], (inputs, parameters, response.text)
    nan = struct.pack("<f", float("nan"))
    head = {"name": "temperature", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}
    response = await infer_binary(oip, {"inputs": [text, head]}, nan, model=CHAT)
    assert response.status_code == 400 and "finite" in response.json()["error"]
    assert oip.workers[f"w-{CHAT}"].requests == []


async def test_generate_answers_whole_and_streamed(oip: Rig) -> None:
    body = {"id": "g1", "text_input": "hi", "max_tokens": 5, "parameters": {"temperature": 0, "max_tokens": 9}}
    whole = (await oip.client.post(f"/v2/models/{CHAT}/generate", json=body)).json()
    assert whole == {
        "id": "g1",
        "model_name": CHAT,
        "model_version": "1",
        "text_output": "Paris is it.",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 3,
    }
    assert oip.workers[f"w-{CHAT}"].requests[0].sampling.max_tokens == 5
    for path in (f"/v2/models/{CHAT}/generate_stream", f"/v2/models/{CHAT}/versions/1/generate_stream"):
        response = await oip.client.post(path, json={**body, "exclude_input_in_output": False})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        assert "".join(event["text_output"] for event in events) == "hiParis is it."
        assert {event["model_name"] for event in events} == {CHAT} and {event["id"] for event in events} == {"g1"}
        assert [event.get("finish_reason") for event in events][-1] == "stop" and events[-1]["completion_tokens"] == 3
        assert all(event["text_output"] for event in events[:-1])
    for bad in ({}, {"text_input": 3}, {"text_input": "hi", "stream": True}, {"text_input": "hi", "parameters": 3}):
        response = await oip.client.post(f"/v2/models/{CHAT}/generate", json=bad)
        assert response.status_code == 400 and response.json()["error"]
    response = await oip.client.post(f"/v2/models/{DOUBLER}/generate", json={"text_input": "hi"})
    assert response.status_code == 400 and "generates no text" in response.json()["error"]


async def test_a_worker_that_fails_is_told_in_the_protocols_form(oip: Rig) -> None:
    worker = oip.workers[f"w-{CHAT}"]
    worker.script = fail("context_length_exceeded", "too long")
    response = await oip.client.post(f"/v2/models/{CHAT}/generate", json={"text_input": "hi"})
    assert (response.status_code, response.json()) == (400, {"error": "too long"})

    async def breaks(request: wire.GenerateRequest) -> Any:
        yield wire.Delta(text="Pa", num_tokens=1)
        yield wire.Delta(error=wire.Error(code="internal_error", message="it broke"), request_done=True)

    worker.script = breaks
    response = await oip.client.post(f"/v2/models/{CHAT}/generate_stream", json={"text_input": "hi"})
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    assert events[0]["text_output"] == "Pa" and events[-1] == {"error": "it broke"}
