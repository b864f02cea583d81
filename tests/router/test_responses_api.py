"""POST /v1/responses over HTTP against a stub worker, with raw requests and with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from named_events import broken_stream, read_events, stream, types
from router_rig import MODEL, Rig, simple
from stub_worker import LENGTH, STOP, fail, hang, play, say, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def client_of(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.client.base_url}/v1", api_key="none", max_retries=0)


async def test_a_whole_response_has_every_field(rig: Rig) -> None:
    await simple(rig, say("Hel", "lo", cached=3))
    response = await rig.post(PATH, asked(metadata={"a": "b"}, user="me"))
    assert response.status_code == 200
    assert response.headers["x-naru-route"].startswith("w0;")
    made = response.json()
    answer_id = made["id"].removeprefix("resp_")
    assert made["completed_at"] >= made["created_at"] > 0
    assert made["output"] == [
        {
            "id": f"msg_{answer_id}_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert made["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    told = {
        key: made[key] for key in ("object", "status", "model", "metadata", "user", "store", "temperature", "top_p")
    }
    assert told == {
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "metadata": {"a": "b"},
        "user": "me",
        "store": False,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    assert (made["error"], made["incomplete_details"], made["truncation"]) == (None, None, "disabled")
    assert (made["tools"], made["tool_choice"], made["text"]["format"]) == ([], "auto", {"type": "text"})


async def test_a_stream_has_openais_events_in_order_and_ends_with_the_same_response(rig: Rig) -> None:
    await simple(rig, say("Hel", "", "lo"))
    events = await stream(rig, PATH, asked())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert "".join(event["delta"] for event in events if "delta" in event) == "Hello"
    final = events[-1]["response"]
    assert final["status"] == "completed"
    assert final["output"][0] == events[-2]["item"]
    assert final["output"][0]["content"] == [events[-3]["part"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {final["output"][0]["id"]}
    whole = (await rig.post(PATH, asked())).json()
    varying = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in final.items() if k not in varying} == {k: v for k, v in whole.items() if k not in varying}


async def test_an_answer_that_was_cut_is_incomplete(rig: Rig) -> None:
    await simple(rig, say("Hel", "lo", finish=LENGTH))
    made = (await rig.post(PATH, asked(max_output_tokens=2))).json()
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (made["output"][0]["status"], made["completed_at"]) == ("incomplete", None)
    assert made["max_output_tokens"] == 2
    events = await stream(rig, PATH, asked(max_output_tokens=2))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == events[-2]["item"]["status"] == "incomplete"


async def test_an_empty_answer_is_a_message_without_text(rig: Rig) -> None:
    await simple(rig, say())
    made = (await rig.post(PATH, asked())).json()
    assert [part["text"] for part in made["output"][0]["content"]] == [""]
    events = await stream(rig, PATH, asked())
    assert "response.output_text.delta" not in types(events)
    assert events[-1]["response"]["output"][0]["content"] == made["output"][0]["content"]


async def test_instructions_and_items_become_the_chat(rig: Rig) -> None:
    worker = await simple(rig)
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"role": "user", "content": "d"},
    ]
    response = await rig.post(PATH, asked(input=items, instructions="Be brief.", max_output_tokens=9, temperature=0))
    assert response.status_code == 200
    (request,) = worker.requests
    assert request.text == (
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0)
    assert response.json()["instructions"] == "Be brief."


async def test_text_formats_bind_the_text(rig: Rig) -> None:
    worker = await simple(rig, say("{}"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    made = (await rig.post(PATH, asked(text={"format": form}))).json()
    assert made["text"]["format"] == form
    await rig.post(PATH, asked(text={"format": {"type": "json_object"}}))
    first, second = (request.sampling.structured for request in worker.requests)
    assert (json.loads(first.json_schema), first.param) == (schema, "text.format.schema")
    assert (second.json_object, second.param) == (True, "text.format")


def likely(text: str) -> wire.Delta:
    token = inf.TokenLogprob(token_id=1, token=text, bytes=text.encode(), logprob=-0.5, rank=1)
    return wire.Delta(text=text, num_tokens=1, logprobs=[inf.PositionLogprobs(chosen=token, top=[token])])


async def test_log_probabilities_stand_with_the_text(rig: Rig) -> None:
    end = wire.Delta(finish_reason=STOP, usage=usage(), request_done=True)
    worker = await simple(rig, play([likely("Hel"), likely("lo"), end]))
    body = asked(include=["message.output_text.logprobs"], top_logprobs=1)
    made = (await rig.post(PATH, body)).json()
    entry = {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108]}
    logprobs = made["output"][0]["content"][0]["logprobs"]
    assert logprobs[0] == {**entry, "top_logprobs": [entry]} and len(logprobs) == 2
    assert worker.requests[0].sampling.logprobs == 1
    events = await stream(rig, PATH, body)
    told = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert told == logprobs
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": "\ud83d"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "id": "a/b"}]}, "input[0].id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "", "name": "n", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0].type"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"include": "x"}, "include"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"store": "yes"}, "store"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_0123456789abcdef01234567"}, "previous_response_id"),
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"user": 5}, "user"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1]"),
    ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", "name": "a", "parameters": {"maximum": 2**70}}]}, "tools[0].parameters"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "all"}}, "tool_choice.mode"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
]


async def test_bad_input_is_refused_and_named(rig: Rig) -> None:
    worker = await simple(rig)
    for fields, param in BAD:
        response = await rig.client.post(
            PATH, content=json.dumps(asked(**fields)), headers={"content-type": "application/json"}
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), (fields, error)
        assert error["type"] == "invalid_request_error"
    assert worker.requests == []


async def test_deep_values_are_refused_and_not_a_crash(rig: Rig) -> None:
    await simple(rig)
    deep: Any = {}
    for _ in range(400):
        deep = {"properties": deep}
    for fields in ({"tools": [{**TOOL, "parameters": deep}]}, {"metadata": deep}):
        response = await rig.post(PATH, asked(**fields))
        assert response.status_code == 400


async def test_a_stream_that_fails_says_so_and_never_that_it_is_complete(rig: Rig) -> None:
    worker = await simple(rig)
    events = await broken_stream(rig, worker, PATH, asked(), "Hel")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events)[-3:] == ["response.output_text.delta", "error", "response.failed"]
    assert events[-2]["code"] == "internal_error" and "it broke" in events[-2]["message"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["usage"]) == ("failed", "server_error", None)


async def test_what_a_worker_refuses_is_told_by_the_field_that_asked_for_it(rig: Rig) -> None:
    await simple(rig, fail("invalid_request_error", "the schema is too large", param="text.format.schema"))
    for fields in ({}, {"stream": True}):
        response = await rig.post(PATH, asked(**fields))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format.schema")


async def test_line_ends_of_other_alphabets_do_not_cut_an_event(rig: Rig) -> None:
    text = "a\u2028b\u2029c\x85d\r\ne"
    await simple(rig, say(*text))
    response = await rig.client.post(PATH, json=asked(stream=True))
    assert not set("\u2028\u2029\x85\r") & set(response.text)
    assert read_events(response.content)[-1]["response"]["output"][0]["content"][0]["text"] == text


async def test_a_client_that_leaves_cancels_its_request(rig: Rig) -> None:
    worker = await simple(rig, hang("Hel"))
    async with rig.client.stream("POST", PATH, json=asked(stream=True)) as response:
        async for _ in response.aiter_raw():
            break
    await worker.until(lambda: bool(worker.cancelled))


async def test_a_silent_stream_that_fails_later_has_an_error_and_no_response(rig: Rig) -> None:
    """A comment has sent the status: the error comes as an event, before any other."""
    go = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await go.wait()
        async for delta in fail("internal_error")(request):
            yield delta

    await simple(rig, script)
    seen = b""
    headers = {"x-naru-keepalive": "1"}
    async with rig.client.stream("POST", PATH, json=asked(stream=True), headers=headers) as response:
        async for data in response.aiter_raw():
            seen += data
            go.set()
    (error,) = read_events(seen.rpartition(b": waiting\n\n")[2])
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "internal_error", 0)


async def test_input_tokens_are_counted_and_nothing_is_generated(rig: Rig) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        delta = wire.Delta(finish_reason=STOP, usage=usage(), request_done=True)
        delta.tokenized.token_ids.extend(range(len(request.tokenize.text.split())))
        yield delta

    worker = await simple(rig, script)
    response = await rig.post("/v1/responses/input_tokens", asked(input="one two three", instructions="Be brief."))
    assert response.json() == {"object": "response.input_tokens", "input_tokens": 8}
    assert worker.requests[0].WhichOneof("task") == "tokenize"


class Place(pydantic.BaseModel):
    city: str
    people: int


async def test_openais_client_reads_whole_streamed_and_parsed_responses(rig: Rig) -> None:
    worker = await simple(rig, say('{"city": ', '"Paris", "people"', ": 2}"))
    async with client_of(rig) as client:
        whole = await client.responses.create(model=MODEL, input="hi", tools=[TOOL])  # type: ignore[list-item]
        assert whole.output_text == '{"city": "Paris", "people": 2}'
        assert whole.usage is not None and whole.usage.output_tokens_details.reasoning_tokens == 0
        openai.types.responses.Response.model_validate(whole.model_dump(by_alias=True))
        parsed = await client.responses.parse(model=MODEL, input="hi", text_format=Place)
        assert parsed.output_parsed == Place(city="Paris", people=2)
        assert json.loads(worker.requests[-1].sampling.structured.json_schema)["additionalProperties"] is False
        async with client.responses.stream(model=MODEL, input="hi", text_format=Place) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_parsed == Place(city="Paris", people=2)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="hi", background=True)
        assert caught.value.param == "background"
