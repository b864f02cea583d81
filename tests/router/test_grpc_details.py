"""What naru.v1.Inference tells beside its status, and its calls beyond text: rich errors, tools, vectors, tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from compatibility.known_worker import CHAT, DIMENSION, DOUBLER, EMBEDDER
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from oip_rig import start
from router_rig import Rig
from stub_worker import fail, hang, say

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire


@pytest.fixture
async def stub(rig: Rig) -> AsyncIterator[Any]:
    """A client of a router with models of every kind."""
    await start(rig)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def details(error: grpc.aio.AioRpcError) -> tuple[Any, dict[str, Any]]:
    """The google.rpc.Status of an error, and its details by their names."""
    metadata: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(dict(metadata)["grpc-status-details-bin"])
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
        message = found[kind.__name__] = kind()
        assert packed.Unpack(message)
    return status, found


async def test_an_error_names_its_code_and_the_field_at_fault(stub: Any) -> None:
    request = inf.InferenceGenerateRequest(model=CHAT, prompt="x", sampling=inf.SamplingParams(top_p=7))
    error = await failure(stub.Generate(request))
    status, found = details(error)
    assert status.code == error.code().value[0] == 3 and status.message == error.details()
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == ("invalid_request_error", "naru.dev")
    (violation,) = found["BadRequest"].field_violations
    assert violation.field == "top_p" and "7" in violation.description
    assert "RetryInfo" not in found


async def test_an_error_says_when_to_come_again(rig: Rig, stub: Any) -> None:
    async def busy(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(
            error=wire.Error(code="rate_limit_exceeded", message="full", retry_after_s=2.5), request_done=True
        )

    rig.workers[f"w-{CHAT}"].script = busy
    status, found = details(await failure(stub.Generate(inf.InferenceGenerateRequest(model=CHAT, prompt="x"))))
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    delay = found["RetryInfo"].retry_delay
    assert delay.seconds + delay.nanos / 1e9 == 2.5 and found["ErrorInfo"].reason == "rate_limit_exceeded"
    rig.workers[f"w-{CHAT}"].script = fail("context_length_exceeded", "zu lang: \U0001f40b", param="prompt")
    error = await failure(stub.Generate(inf.InferenceGenerateRequest(model=CHAT, prompt="x")))
    _, found = details(error)
    assert found["BadRequest"].field_violations[0].description == "zu lang: \U0001f40b"


async def test_unknown_models_have_details_in_every_call(stub: Any) -> None:
    for call in (
        stub.Generate(inf.InferenceGenerateRequest(model="nope")),
        stub.Embed(inf.InferenceEmbedRequest(model="nope", texts=["a"])),
        stub.Tokenize(inf.InferenceTokenizeRequest(model="nope")),
        stub.Detokenize(inf.InferenceDetokenizeRequest(model="nope")),
    ):
        error = await failure(call)
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert details(error)[1]["ErrorInfo"].reason == "model_not_found"


async def test_vectors_of_texts(rig: Rig, stub: Any) -> None:
    reply = await stub.Embed(inf.InferenceEmbedRequest(model=EMBEDDER, texts=["a", "b"], request_id="e1"))
    assert [list(vector.values) for vector in reply.vectors] == [[0.5] * DIMENSION, [1.5] * DIMENSION]
    assert reply.request_id == "e1" and reply.usage.prompt_tokens == 5
    request = inf.InferenceEmbedRequest(model=EMBEDDER, texts=["a"], dimensions=2, truncate_tokens=-1)
    assert len((await stub.Embed(request)).vectors[0].values) == 2
    assert rig.workers[f"w-{EMBEDDER}"].requests[-1].pooling.truncate_tokens == -1
    bad: list[tuple[dict[str, Any], str]] = [
        ({"texts": []}, "texts"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"texts": ["a"], "dimensions": -1}, "dimensions"),
        ({"texts": ["a"], "dimensions": DIMENSION + 1}, "dimensions"),
        ({"texts": ["a"], "truncate_tokens": -2}, "truncate_tokens"),
        ({"texts": ["a"], "request_id": "a b"}, "request_id"),
        ({"texts": ["a"], "model": DOUBLER}, "model"),
    ]
    for fields, name in bad:
        error = await failure(stub.Embed(inf.InferenceEmbedRequest(**{"model": EMBEDDER, **fields})))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and (error.details() or "").startswith(name), fields


async def test_tokens_of_texts_and_back(rig: Rig, stub: Any) -> None:
    request = inf.InferenceTokenizeRequest(model=CHAT, text="a b c", with_texts=True, add_special_tokens=True)
    reply = await stub.Tokenize(request)
    assert (list(reply.token_ids), list(reply.texts)) == ([0, 1, 2], ["a", "b", "c"])
    assert rig.workers[f"w-{CHAT}"].requests[-1].tokenize.add_special_tokens
    back = await stub.Detokenize(inf.InferenceDetokenizeRequest(model=CHAT, token_ids=[3, 4]))
    assert back.text == "t3 t4"
    error = await failure(stub.Detokenize(inf.InferenceDetokenizeRequest(model=CHAT, token_ids=[-1])))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_prompt_logprobs_come_first(rig: Rig, stub: Any) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        assert request.sampling.prompt_logprobs == 2
        first = wire.Delta(text="a", num_tokens=1)
        first.prompt_logprobs.add().chosen.token = "hi"
        yield first
        async for delta in say("b")(request):
            yield delta

    rig.workers[f"w-{CHAT}"].script = script
    sampling = inf.SamplingParams(prompt_logprobs=2)
    request = inf.InferenceGenerateRequest(model=CHAT, prompt="hi", sampling=sampling)
    replies = [each async for each in stub.Generate(request)]
    assert replies[0].prompt_logprobs[0].chosen.token == "hi" and not replies[0].text
    assert "".join(each.text for each in replies) == "ab" and replies[-1].usage.prompt_tokens == 5


async def test_structured_output_reaches_the_worker_and_is_named(rig: Rig, stub: Any) -> None:
    sampling = inf.SamplingParams(structured=inf.StructuredOutput(regex="a+"))
    async for _ in stub.Generate(inf.InferenceGenerateRequest(model=CHAT, prompt="hi", sampling=sampling)):
        pass
    sent = rig.workers[f"w-{CHAT}"].requests[0].sampling.structured
    assert (sent.regex, sent.param) == ("a+", "sampling.structured")
    empty = inf.SamplingParams(structured=inf.StructuredOutput())
    error = await failure(stub.Generate(inf.InferenceGenerateRequest(model=CHAT, prompt="hi", sampling=empty)))
    assert (error.details() or "").startswith("structured")


WEATHER = inf.Tool(name="weather", parameters='{"type": "object", "properties": {"city": {"type": "string"}}}')
CALLS_TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


async def test_a_chat_calls_a_tool_and_takes_its_result(rig: Rig) -> None:
    from router_rig import info

    await rig.publish_model("hermes")
    texts = ("<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": "Rome"}}', "\n</tool_call>")
    worker = await rig.start_worker("w-h", say(*texts), models=("hermes",), facts=info(CALLS_TOOLS))
    await rig.start_router()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        asked = inf.ChatMessage(role="user", content="How is Rome?")
        request = inf.InferenceChatRequest(model="hermes", messages=[asked], tools=[WEATHER])
        replies = [each async for each in stub.Chat(request)]
        calls = [each.tool_call for each in replies if each.HasField("tool_call")]
        assert calls[0].name == "weather" and calls[0].id and not any(each.name for each in calls[1:])
        assert "".join(each.arguments for each in calls) == '{"city": "Rome"}'
        assert replies[-1].finish_reason == inf.FINISH_REASON_TOOL_CALLS and replies[-1].usage.prompt_tokens == 5
        assert "".join(each.text for each in replies) == ""
        worker.script = say("Sunny")
        made = inf.ToolCall(id=calls[0].id, name="weather", arguments='{"city": "Rome"}')
        answer = inf.ChatMessage(role="tool", content="sunny", tool_call_id=calls[0].id)
        request.messages.extend([inf.ChatMessage(role="assistant", tool_calls=[made]), answer])
        assert "".join([each.text async for each in stub.Chat(request)]) == "Sunny"
        bad: list[tuple[Any, str]] = [
            ({"tools": [inf.Tool(name="a b")]}, "tools[0]"),
            ({"tools": [WEATHER, WEATHER]}, "tools"),
            ({"tools": [inf.Tool(name="w", parameters="[")]}, "tools[0].parameters"),
            ({"tool_choice": inf.ToolChoice(mode="required")}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": inf.ToolChoice(mode="named", name="x")}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": inf.ToolChoice(mode="maybe")}, "tool_choice"),
            ({"template_options": "[]"}, "template_options"),
            ({"messages": [answer]}, "messages[0]"),
        ]
        for fields, name in bad:
            given = {"model": "hermes", "messages": [asked], **fields}
            error = await failure(stub.Chat(inf.InferenceChatRequest(**given)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            assert (error.details() or "").startswith(name), (fields, error.details())


async def test_a_deadline_is_told_to_the_worker_and_kept(rig: Rig, stub: Any) -> None:
    worker = rig.workers[f"w-{CHAT}"]
    worker.script = hang("tok")
    call = stub.Generate(inf.InferenceGenerateRequest(model=CHAT, prompt="x"), timeout=0.5)
    error = await failure(call)
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < worker.requests[0].timeout_s <= 0.5
    await worker.until(lambda: not worker.running)
