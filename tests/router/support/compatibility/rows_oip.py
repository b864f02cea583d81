"""The Open Inference Protocol over HTTP: what clients of KServe and Triton may send."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from typing import Any

from compatibility.known_worker import CHAT, DIMENSION, DOUBLER, EMBEDDER, RANKER
from compatibility.row import Outcome, Row

API = "Open Inference Protocol"
INFER = f"/v2/models/{DOUBLER}/infer"
GENERATE = f"/v2/models/{CHAT}/generate"
NUMBERS = [1, 2, 3, 4]
DOUBLED = [3.0, 5.0, 7.0, 9.0]
RAW = struct.pack("<4f", *NUMBERS)
LENGTH = "inference-header-content-length"


def x(**fields: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": NUMBERS, **fields}


def texts(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": list(values)}


def infer(**fields: Any) -> dict[str, Any]:
    return {"inputs": [x()], **fields}


def gives(expected: Any) -> Callable[[Outcome], None]:
    """The first output's data."""

    def check(outcome: Outcome) -> None:
        assert outcome.json["outputs"][0]["data"] == expected

    return check


def is_json(expected: Any) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        assert outcome.json == expected

    return check


def has(name: str) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        assert outcome.json[name]

    return check


def sends(**expected: Any) -> Callable[[Outcome], None]:
    """What the worker was asked."""

    def check(outcome: Outcome) -> None:
        sampling = outcome.sent.sampling
        assert {name: getattr(sampling, name) for name in expected} == expected

    return check


def check_binary_output(outcome: Outcome) -> None:
    length = int(outcome.response.headers[LENGTH])
    assert json.loads(outcome.response.content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert outcome.response.content[length:] == struct.pack("<4f", *DOUBLED)


def check_index(outcome: Outcome) -> None:
    assert {each["state"] for each in outcome.json} == {"READY"} and len(outcome.json) == 4


def check_stream(outcome: Outcome) -> None:
    assert "".join(event["text_output"] for event in outcome.events) == "Paris is it."
    assert outcome.events[-1]["finish_reason"] == "stop"


def check_timeout(outcome: Outcome) -> None:
    assert 0 < outcome.sent.timeout_s <= 5


def check_texts(outcome: Outcome) -> None:
    outputs = {each["name"]: each["data"] for each in outcome.json["outputs"]}
    assert outputs["text_output"] == ["Paris is it."] * 2 and outputs["completion_tokens"] == [3, 3]


def binary_body() -> bytes:
    head = {key: value for key, value in x().items() if key != "data"} | {"parameters": {"binary_data_size": 16}}
    return json.dumps({"inputs": [head]}).encode() + RAW


def yes(feature: str, what: str, path: str, body: Any, check: Callable[[Outcome], object], **more: Any) -> Row:
    return Row(API, feature, "yes", what, path, body, check, **more)


def refused(feature: str, what: str, body: Any, says: str, path: str = INFER, **more: Any) -> Row:
    return Row(API, feature, "refused", what, path, body, says=says, **more)


BINARY = binary_body()
GZIP = {"content-encoding": "gzip"}

ROWS = [
    yes("`GET /v2/health/live`", "", "/v2/health/live", None, is_json({"live": True})),
    yes("`GET /v2/health/ready`", "", "/v2/health/ready", None, is_json({"ready": True})),
    yes("`GET /v2`", "", "/v2", None, has("extensions")),
    yes("`GET /v2/models/{m}`", "what it takes and gives", f"/v2/models/{DOUBLER}", None, has("inputs")),
    yes("`GET …/ready`", "", f"/v2/models/{DOUBLER}/ready", None, is_json({"name": DOUBLER, "ready": True})),
    yes("`GET …/config`", "Triton's words for it", f"/v2/models/{DOUBLER}/config", None, has("max_batch_size")),
    yes("`GET …/stats`", "of this router", f"/v2/models/{DOUBLER}/stats", None, has("model_stats")),
    yes("`…/versions/1`", "the same as without it", f"/v2/models/{DOUBLER}/versions/1", None, has("inputs")),
    yes("`POST /v2/repository/index`", "", "/v2/repository/index", {}, check_index),
    yes("`POST …/load`", "brings it up", f"/v2/repository/models/{DOUBLER}/load", {}, has("load")),
    yes("`inputs` in JSON", "flat or nested", INFER, infer(inputs=[x(data=[NUMBERS])]), gives(DOUBLED)),
    yes("binary inputs", "", INFER, BINARY, gives(DOUBLED), headers={LENGTH: str(len(BINARY) - 16)}),
    yes("`binary_data_output`", "", INFER, infer(parameters={"binary_data_output": True}), check_binary_output),
    yes(
        "`binary_data` of an output",
        "wins over `binary_data_output`",
        INFER,
        infer(outputs=[{"name": "y", "parameters": {"binary_data": True}}]),
        check_binary_output,
    ),
    yes(
        "`Content-Encoding`",
        "gzip, deflate",
        INFER,
        gzip.compress(json.dumps(infer()).encode()),
        gives(DOUBLED),
        headers=GZIP,
    ),
    yes("`id`", "comes back", INFER, infer(id="a1"), has("id")),
    yes(
        "`timeout`",
        "microseconds; ends a call that takes longer",
        INFER,
        infer(parameters={"timeout": 5_000_000}),
        check_timeout,
    ),
    yes(
        "embedding models",
        "`text` to `embedding`",
        f"/v2/models/{EMBEDDER}/infer",
        {"inputs": [texts("text", "a")]},
        gives([0.5] * DIMENSION),
    ),
    yes(
        "rerankers",
        "`text`, `text_pair` to `score`",
        f"/v2/models/{RANKER}/infer",
        {"inputs": [texts("text", "a"), texts("text_pair", "b")]},
        gives([0.5]),
    ),
    yes(
        "text generation by `infer`",
        "`text_input` to `text_output`",
        f"/v2/models/{CHAT}/infer",
        {"inputs": [texts("text_input", "a", "b")], "parameters": {"max_tokens": 5}},
        check_texts,
    ),
    yes("`generate`", "", GENERATE, {"text_input": "a"}, has("text_output")),
    yes("`generate_stream`", "events with more of the text", f"{GENERATE}_stream", {"text_input": "a"}, check_stream),
    yes(
        "options of `generate`",
        "beside `text_input` or in `parameters`",
        GENERATE,
        {"text_input": "a", "max_tokens": 5, "parameters": {"top_k": 3, "random_seed": 7, "stop_words": ["z"]}},
        sends(max_tokens=5, top_k=3, seed=7, stop=["z"]),
    ),
    Row(API, "other parameters", "ignored", "", INFER, infer(parameters={"custom": 1}), gives(DOUBLED)),
    refused("an unknown model", "404", infer(), "nope", "/v2/models/nope/infer", code=404),
    refused("versions but 1", "404", infer(), "version", f"/v2/models/{DOUBLER}/versions/2/infer", code=404),
    refused(
        "`classification`", "", infer(outputs=[{"name": "y", "parameters": {"classification": 3}}]), "classification"
    ),
    refused("shared memory", "", infer(inputs=[x(parameters={"shared_memory_region": "r"})]), "shared memory"),
    refused("`sequence_id`", "models keep no state", infer(parameters={"sequence_id": 7}), "sequence_id"),
    refused("`priority`", "`x-naru-priority` says it", infer(parameters={"priority": 1}), "x-naru-priority"),
    refused("BF16 in JSON", "sent as binary data", infer(inputs=[x(datatype="BF16")]), "BF16"),
    refused("`n`", "one answer for a text", {"text_input": "a", "n": 2}, "n is not 1", GENERATE),
    refused(
        "`config` of a load",
        "a ModelDeployment says it",
        {"parameters": {"config": "{}"}},
        "ModelDeployment",
        f"/v2/repository/models/{DOUBLER}/load",
    ),
    refused(
        "`unload` of a model that is kept up",
        "`replicas.min` above 0, or pinned",
        {},
        "replicas.min",
        f"/v2/repository/models/{DOUBLER}/unload",
    ),
    refused("trace, log settings", "404", {}, "nothing", "/v2/trace/setting", code=404),
]
