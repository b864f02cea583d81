"""The public gRPC API over loopback: same answers and refusals as HTTP, health and reflection beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_rig import MODEL, Rig, simple
from stub_worker import STOP, fail, hang, say

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc

HI = [inf.ChatMessage(role="user", content="hi")]


def untyped_stub(module: Any, name: str, channel: Any) -> Any:
    """A client of a library's service, typed or not."""
    return getattr(module, name)(channel)


@pytest.fixture
async def stub(rig: Rig) -> AsyncIterator[Any]:
    """A client of a router with one model and one worker."""
    await rig.publish_model(aliases=("small",))
    await rig.start_worker()
    await rig.start_router()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def test_generate_streams_text_reason_and_usage(rig: Rig, stub: Any) -> None:
    request = inf.InferenceGenerateRequest(model="small", prompt="x", request_id="mine")
    request.sampling.n = 2
    replies = [r async for r in stub.Generate(request)]
    for index in range(2):
        of_choice = [r for r in replies if r.index == index]
        assert "".join(r.text for r in of_choice) == "Hello" and of_choice[-1].finish_reason == STOP
    assert replies[-1].usage.prompt_tokens == 5 and {r.request_id for r in replies} == {"mine"}
    assert rig.workers["w0"].requests[0].add_special_tokens


async def test_chat_renders_the_template(rig: Rig, stub: Any) -> None:
    replies = [r async for r in stub.Chat(inf.InferenceChatRequest(model=MODEL, messages=HI))]
    assert "".join(r.text for r in replies) == "Hello" and replies[0].request_id
    sent = rig.workers["w0"].requests[0]
    assert sent.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and not sent.add_special_tokens


async def test_models_are_listed(stub: Any) -> None:
    (card,) = (await stub.ListModels(inf.ListModelsRequest())).models
    assert (card.name, list(card.aliases), card.max_model_len, card.ready_workers) == (MODEL, ["small"], 2048, 1)


def sampling(**fields: Any) -> inf.SamplingParams:
    return inf.SamplingParams(**fields)


REFUSED: list[tuple[inf.SamplingParams, str]] = [
    (sampling(temperature=float("nan")), "temperature"),
    (sampling(temperature=-1), "temperature"),
    (sampling(top_p=1.5), "top_p"),
    (sampling(min_p=float("inf")), "min_p"),
    (sampling(repetition_penalty=0), "repetition_penalty"),
    (sampling(top_k=-2), "top_k"),
    (sampling(max_tokens=-1), "max_tokens"),
    (sampling(max_tokens=1, min_tokens=2), "min_tokens"),
    (sampling(n=0), "n"),
    (sampling(n=1000), "n"),
    (sampling(stop=[""]), "stop"),
    (sampling(stop=["x"] * 17), "stop"),
    (sampling(stop_token_ids=[-1]), "stop_token_ids"),
    (sampling(logit_bias={-1: 1.0}), "logit_bias"),
    (sampling(logit_bias={1: 101.0}), "logit_bias"),
    (sampling(logit_bias={1: float("nan")}), "logit_bias"),
    (sampling(logprobs=21), "logprobs"),
    (sampling(prompt_logprobs=21), "prompt_logprobs"),
]


async def test_bad_sampling_is_refused_by_its_name(rig: Rig, stub: Any) -> None:
    for params, name in REFUSED:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt="x", sampling=params)):
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(name), (params, caught.value.details())
    assert rig.workers["w0"].requests == []


async def test_errors_have_their_status(rig: Rig, stub: Any) -> None:
    async def chat(**fields: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Chat(inf.InferenceChatRequest(**{"model": MODEL, "messages": HI, **fields})):
                pass
        status: grpc.StatusCode = caught.value.code()
        return status

    assert await chat(model="nope") == grpc.StatusCode.NOT_FOUND
    assert await chat(messages=[]) == grpc.StatusCode.INVALID_ARGUMENT
    assert await chat(messages=[inf.ChatMessage(role="alien", content="x")]) == grpc.StatusCode.INVALID_ARGUMENT
    assert await chat(request_id="a b") == grpc.StatusCode.INVALID_ARGUMENT
    worker = rig.workers["w0"]
    for code, status in (
        ("context_length_exceeded", grpc.StatusCode.INVALID_ARGUMENT),
        ("rate_limit_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("service_unavailable", grpc.StatusCode.UNAVAILABLE),
        ("internal_error", grpc.StatusCode.INTERNAL),
        ("made_up", grpc.StatusCode.INTERNAL),
    ):
        worker.script = fail(code)
        assert await chat() == status


async def test_a_cancelled_call_is_cancelled_on_the_worker(rig: Rig, stub: Any) -> None:
    worker = rig.workers["w0"]
    worker.script = hang("tok")
    call = stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt="x"))
    assert (await call.read()).text == "tok"
    call.cancel()
    await worker.until(lambda: not worker.running)
    assert len(worker.cancelled) == 1


async def test_a_lost_worker_is_replaced_before_the_first_reply(rig: Rig) -> None:
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{i}", hang()) for i in range(2)]
    await rig.start_router()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def ask() -> str:
            return "".join([r.text async for r in stub.Generate(inf.InferenceGenerateRequest(model=MODEL, prompt="x"))])

        call = asyncio.create_task(ask())
        started = [asyncio.create_task(w.until(lambda w=w: bool(w.running))) for w in workers]  # type: ignore[misc]
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        for task in started:
            task.cancel()
        victim = next(w for w in workers if w.running)
        for worker in workers:
            worker.script = say("Hel", "lo")
        await victim.kill()
        assert await call == "Hello"


async def test_health_and_reflection_stand_beside_it(rig: Rig) -> None:
    await simple(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        health = untyped_stub(health_pb2_grpc, "HealthStub", channel)
        check = health_pb2.HealthCheckRequest(service="naru.v1.Inference")
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        reflection = untyped_stub(reflection_pb2_grpc, "ServerReflectionStub", channel)
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        services = {s.name for s in (await call.read()).list_services_response.service}
        assert {"naru.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"} <= services
        await call.done_writing()
        rig.app.gate.close()
        await rig.app.drain()
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
