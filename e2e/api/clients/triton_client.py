"""`tritonclient` over HTTP and gRPC against Naru, unchanged. Arguments: URL, gRPC address. Fails by an exception."""

from __future__ import annotations

import json
import queue
import sys
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

CHAT, EMBEDDER, DOUBLER = "smollm2", "minilm", "doubler"
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def tensor(module: Any, name: str, values: np.ndarray, datatype: str, **how: Any) -> Any:
    """An input with its data."""
    made = module.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, **how)
    return made


def texts(module: Any, name: str, *values: str) -> Any:
    """An input of texts."""
    return tensor(module, name, np.array([value.encode() for value in values], dtype=object), "BYTES")


def must_fail(what: str, ask: Any) -> str:
    """The message of the refusal."""
    try:
        ask()
    except InferenceServerException as exc:
        return str(exc)
    raise AssertionError(f"{what} was not refused")


def server(client: Any) -> None:
    """Health, and what there is."""
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(DOUBLER) and client.is_model_ready(DOUBLER, "1")
    client.get_server_metadata()
    client.get_model_repository_index()
    client.get_inference_statistics(DOUBLER)
    must_fail("an unknown model", lambda: client.get_model_metadata("no-such-model"))
    must_fail("an unknown version", lambda: client.get_model_metadata(DOUBLER, "7"))


def infer(client: Any, module: Any) -> None:
    """Tensors, texts and vectors."""
    result = client.infer(DOUBLER, [tensor(module, "x", X, "FP32")], request_id="r1")
    np.testing.assert_allclose(result.as_numpy("y"), 2 * X + 1)
    asked = [module.InferRequestedOutput("y")]
    result = client.infer(DOUBLER, [tensor(module, "x", X[:1], "FP32")], outputs=asked)
    np.testing.assert_allclose(result.as_numpy("y"), 2 * X[:1] + 1)
    must_fail("a wrong shape", lambda: client.infer(DOUBLER, [tensor(module, "x", X.reshape(4, 2), "FP32")]))
    must_fail("a wrong datatype", lambda: client.infer(DOUBLER, [tensor(module, "x", X.astype(np.int64), "INT64")]))
    vectors = client.infer(EMBEDDER, [texts(module, "text", "a cat", "a kitten", "bonds fell")]).as_numpy("embedding")
    assert vectors.shape[0] == 3 and vectors.dtype == np.float32
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    limit = tensor(module, "max_tokens", np.array([16], dtype=np.int32), "INT32")
    greedy = tensor(module, "temperature", np.array([0], dtype=np.float32), "FP32")
    result = client.infer(CHAT, [texts(module, "text_input", "The capital of France is", "One, two,"), limit, greedy])
    answers = [text.decode() for text in result.as_numpy("text_output")]
    assert "Paris" in answers[0] and len(answers) == 2, answers
    assert list(result.as_numpy("completion_tokens")) == [16, 16]


def over_http(address: str) -> None:
    """What HTTP alone has: JSON beside binary data, compression, generate and its stream."""
    module = tritonclient.http
    client = module.InferenceServerClient(address)
    server(client)
    infer(client, module)
    metadata = client.get_model_metadata(DOUBLER)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}], metadata
    assert client.get_model_config(DOUBLER)["max_batch_size"] == 8
    assert {model["name"] for model in client.get_model_repository_index()} >= {CHAT, EMBEDDER, DOUBLER}
    plain = tensor(module, "x", X, "FP32", binary_data=False)
    for asked in (module.InferRequestedOutput("y", binary_data=False), module.InferRequestedOutput("y")):
        np.testing.assert_allclose(client.infer(DOUBLER, [plain], outputs=[asked]).as_numpy("y"), 2 * X + 1)
    for algorithm in ("gzip", "deflate"):
        result = client.infer(DOUBLER, [tensor(module, "x", X, "FP32")], request_compression_algorithm=algorithm)
        np.testing.assert_allclose(result.as_numpy("y"), 2 * X + 1)
    client.load_model(DOUBLER)
    client.close()
    body = {"text_input": "The capital of France is", "parameters": {"max_tokens": 16, "temperature": 0}}
    whole = json.loads(post(f"http://{address}/v2/models/{CHAT}/generate", body))
    assert "Paris" in whole["text_output"] and whole["finish_reason"] == "length", whole
    stream = post(f"http://{address}/v2/models/{CHAT}/generate_stream", body)
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert events[-1]["finish_reason"] == "length" and len(events) > 2


def post(url: str, body: object) -> str:
    """The reply's text."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(reply.read().decode())


def over_grpc(address: str) -> None:
    """What gRPC alone has: a stream of calls, and of one text as it is made."""
    module = tritonclient.grpc
    client = module.InferenceServerClient(address)
    server(client)
    infer(client, module)
    config = client.get_model_config(CHAT).config
    assert config.model_transaction_policy.decoupled
    assert list(client.get_model_metadata(DOUBLER).inputs[0].shape) == [-1, 4]
    client.load_model(DOUBLER)
    results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: results.put((result, error)))
    inputs = [
        texts(module, "text_input", "The capital of France is"),
        tensor(module, "stream", np.array([True]), "BOOL"),
        tensor(module, "max_tokens", np.array([16], dtype=np.int32), "INT32"),
        tensor(module, "temperature", np.array([0], dtype=np.float32), "FP32"),
    ]
    client.async_stream_infer(CHAT, inputs, request_id="s1", enable_empty_final_response=True)
    text, count, is_final = "", 0, False
    while not is_final:
        result, error = results.get(timeout=60)
        assert error is None, error
        response = result.get_response()
        assert response.id == "s1"
        text, count = text + result.as_numpy("text_output")[0].decode(), count + 1
        is_final = response.parameters["triton_final_response"].bool_param
    assert "Paris" in text and count > 2, (text, count)
    client.async_stream_infer("no-such-model", inputs, request_id="s2")
    result, error = results.get(timeout=60)
    assert result is None and "no-such-model" in str(error)
    client.async_stream_infer(DOUBLER, [tensor(module, "x", X, "FP32")], request_id="s3")
    result, error = results.get(timeout=60)
    assert error is None, error
    np.testing.assert_allclose(result.as_numpy("y"), 2 * X + 1)
    client.stop_stream()
    client.close()


def main() -> None:
    """Everything over both."""
    over_http(sys.argv[1].removeprefix("http://").rstrip("/"))
    over_grpc(sys.argv[2])
    print("ok: tritonclient")


if __name__ == "__main__":
    main()
