"""The Open Inference Protocol over gRPC: typed and raw tensors, streams, refusals, reflection."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from compatibility.known_worker import CHAT, DIMENSION, DOUBLER, EMBEDDER, FACTS
from grpc_health.v1 import health_pb2, health_pb2_grpc
from oip_rig import start
from router_rig import Rig
from stub_worker import hang

from naru_proto.v1 import open_inference_pb2 as oip
from naru_proto.v1 import open_inference_pb2_grpc

ONE = [1.0, 2.0, 3.0, 4.0]
DOUBLED = [3.0, 5.0, 7.0, 9.0]
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture
async def stub(rig: Rig) -> AsyncIterator[Any]:
    """A client of a router with models of every kind."""
    await start(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        yield open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def doubler(*, raw: bytes | None = None, shape: tuple[int, ...] = (1, 4), datatype: str = "FP32") -> Any:
    request = oip.ModelInferRequest(model_name=DOUBLER, id="r1")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=shape)
    if raw is None:
        tensor.contents.fp32_contents.extend(ONE)
    else:
        request.raw_input_contents.append(raw)
    return request


def text_request(*texts: str, **options: Any) -> Any:
    request = oip.ModelInferRequest(model_name=CHAT, id="t1")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend([text.encode() for text in texts])
    if "stream" in options:
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(options["stream"])
    if "max_tokens" in options:
        request.parameters["max_tokens"].int64_param = options["max_tokens"]
    return request


async def test_server_and_models_tell_what_http_tells(rig: Rig, stub: Any) -> None:
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "naru"
    assert (await stub.ModelReady(oip.ModelReadyRequest(name=DOUBLER, version="1"))).ready
    for name in FACTS:
        told = await stub.ModelMetadata(oip.ModelMetadataRequest(name=name))
        page = (await rig.client.get(f"/v2/models/{name}")).json()
        assert [(each.name, each.datatype, list(each.shape)) for each in told.inputs] == [
            (each["name"], each["datatype"], each["shape"]) for each in page["inputs"]
        ]
        assert [each.name for each in told.outputs] == [each["name"] for each in page["outputs"]]
    config = (await stub.ModelConfig(oip.ModelConfigRequest(name=DOUBLER))).config
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (8, oip.TYPE_FP32, [4])
    assert (await stub.ModelConfig(oip.ModelConfigRequest(name=CHAT))).config.model_transaction_policy.decoupled
    index = (await stub.RepositoryIndex(oip.RepositoryIndexRequest())).models
    assert [(each.name, each.state) for each in index] == [(name, "READY") for name in sorted(FACTS)]


async def test_typed_contents_are_answered_typed_and_raw_ones_raw(rig: Rig, stub: Any) -> None:
    typed = await stub.ModelInfer(doubler())
    assert (typed.model_name, typed.model_version, typed.id) == (DOUBLER, "1", "r1")
    (output,) = typed.outputs
    assert list(output.contents.fp32_contents) == DOUBLED and list(output.shape) == [1, 4]
    assert not typed.raw_output_contents
    raw = await stub.ModelInfer(doubler(raw=packed(*ONE)))
    assert list(raw.raw_output_contents) == [packed(*DOUBLED)] and not raw.outputs[0].HasField("contents")


async def test_texts_become_vectors_and_answers(rig: Rig, stub: Any) -> None:
    request = oip.ModelInferRequest(model_name=EMBEDDER)
    request.inputs.add(name="text", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b"b"])
    (output,) = (await stub.ModelInfer(request)).outputs
    assert (output.name, list(output.shape)) == ("embedding", [2, DIMENSION])
    reply = await stub.ModelInfer(text_request("one", "two", max_tokens=9))
    outputs = {each.name: each for each in reply.outputs}
    assert list(outputs["text_output"].contents.bytes_contents) == [b"Paris is it."] * 2
    assert list(outputs["completion_tokens"].contents.int_contents) == [3, 3]
    assert rig.workers[f"w-{CHAT}"].requests[0].sampling.max_tokens == 9


async def test_a_stream_gives_a_text_as_it_is_made_and_marks_its_last_response(stub: Any) -> None:
    async def requests() -> AsyncIterator[Any]:
        yield text_request("hi", stream=True)

    responses = [each async for each in stub.ModelStreamInfer(requests())]
    assert all(not each.error_message and each.infer_response.id == "t1" for each in responses)
    pieces = [each.infer_response.outputs[0].contents.bytes_contents[0] for each in responses]
    assert b"".join(pieces) == b"Paris is it." and len(pieces) > 1
    finals = [each.infer_response.parameters["triton_final_response"].bool_param for each in responses]
    assert finals == [False] * (len(finals) - 1) + [True]
    last = {each.name: each for each in responses[-1].infer_response.outputs}
    assert list(last["finish_reason"].contents.bytes_contents) == [b"stop"]


async def test_a_failed_request_of_a_stream_ends_nothing_else(rig: Rig, stub: Any) -> None:
    async def requests() -> AsyncIterator[Any]:
        unknown = doubler()
        unknown.model_name, unknown.id = "nope", "bad"
        yield unknown
        for number in range(100):
            request = doubler()
            request.id = f"r{number}"
            yield request
        yield text_request("whole")

    found = {}
    async for each in stub.ModelStreamInfer(requests()):
        found[each.infer_response.id] = each
    assert "nope" in found.pop("bad").error_message
    whole = found.pop("t1").infer_response
    assert whole.outputs[0].contents.bytes_contents[0] == b"Paris is it."
    assert set(found) == {f"r{number}" for number in range(100)}
    assert all(list(each.infer_response.outputs[0].contents.fp32_contents) == DOUBLED for each in found.values())


async def test_a_cancelled_call_or_stream_is_cancelled_on_the_worker(rig: Rig, stub: Any) -> None:
    worker = rig.workers[f"w-{CHAT}"]
    worker.script = hang("tok")

    async def requests() -> AsyncIterator[Any]:
        yield text_request("hi", stream=True)
        yield text_request("hi", stream=True)

    calls = [stub.ModelInfer(text_request("hi")), stub.ModelStreamInfer(requests())]
    assert (await calls[1].read()).infer_response.id == "t1"
    await worker.until(lambda: len(worker.running) == 3)
    for call in calls:
        call.cancel()
    await worker.until(lambda: not worker.running)
    assert len(worker.cancelled) == 3


async def test_the_deadline_of_a_call_counts(rig: Rig, stub: Any) -> None:
    worker = rig.workers[f"w-{DOUBLER}"]
    worker.script = hang()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(doubler(), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < worker.requests[0].timeout_s <= 0.3
    await worker.until(lambda: not worker.running)


def bad_requests() -> list[tuple[Any, str]]:
    lies = [(doubler(raw=b""), "inputs[0]"), (doubler(raw=packed(*ONE)[:15]), "inputs[0]")]
    lies += [(doubler(raw=packed(*ONE), shape=shape), "") for shape in ((4,), (2, 2), (-1, 4), (2**62, 2**62), (9, 4))]
    lies += [(doubler(raw=b"\0" * 32, datatype="INT64"), "takes FP32"), (doubler(datatype="FLOAT"), "datatype")]
    lies += [(doubler(datatype="INT32"), "int_contents"), (doubler(datatype="BF16"), "raw_input_contents")]
    lies += [(doubler(shape=(1, 3)), "3"), (oip.ModelInferRequest(model_name=DOUBLER), "inputs")]
    both, two, unknown, output, huge = (
        doubler(raw=packed(*ONE)),
        doubler(raw=packed(*ONE)),
        doubler(),
        doubler(),
        doubler(),
    )
    both.inputs[0].contents.fp32_contents.extend(ONE)
    two.raw_input_contents.append(packed(*ONE))
    unknown.inputs[0].name = "z"
    output.outputs.add(name="z")
    huge.id = "x" * 1000
    shared = doubler()
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    sequence = doubler()
    sequence.parameters["sequence_id"].uint64_param = 3
    lies += [(both, "one of them"), (two, "2 items"), (unknown, "'z'"), (output, "'z'"), (huge, "id")]
    lies += [
        (shared, "shared memory"),
        (sequence, "sequence_id"),
        (text_request("hi", stream=True), "ModelStreamInfer"),
    ]
    broken = text_request("hi")
    broken.inputs[0].contents.bytes_contents[0] = b"\xff"
    short = text_request("hi")
    short.ClearField("inputs")
    short.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    short.raw_input_contents.append(struct.pack("<I", 100) + b"hi")
    return [*lies, (broken, "UTF-8"), (short, "beyond")]


async def test_bad_requests_are_refused_before_any_worker_is_asked(rig: Rig, stub: Any) -> None:
    for request, says in bad_requests():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (request, caught.value.details())
        assert says in (caught.value.details() or ""), (request, caught.value.details())
    for version, name in (("2", DOUBLER), ("", "nope")):
        request = doubler()
        request.model_name, request.model_version = name, version
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert all(worker.requests == [] for worker in rig.workers.values())


async def test_statistics_are_of_both_edges(rig: Rig, stub: Any) -> None:
    await stub.ModelInfer(doubler())
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ONE}]}
    await rig.client.post(f"/v2/models/{DOUBLER}/infer", json=body)
    (stats,) = (await stub.ModelStatistics(oip.ModelStatisticsRequest(name=DOUBLER))).model_stats
    assert (stats.execution_count, stats.inference_stats.success.count) == (2, 2)
    assert len((await stub.ModelStatistics(oip.ModelStatisticsRequest())).model_stats) == len(FACTS)


async def test_what_is_not_built_answers_unimplemented_and_health_names_the_service(rig: Rig, stub: Any) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        method: Any = channel.unary_unary  # a library whose types want more than it does
        call = method(f"/{SERVICE}/SystemSharedMemoryStatus")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        health: Any = getattr(health_pb2_grpc, "HealthStub")(channel)  # noqa: B009 - a library without types
        for service in ("", SERVICE, "naru.v1.Inference"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
