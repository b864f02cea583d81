"""POST /v1/messages over HTTP against a stub worker: shapes of whole and streamed messages, errors, counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from named_events import broken_stream, read_events, stream, types
from router_rig import MODEL, Rig, simple
from stub_worker import LENGTH, STOP, fail, hang, play, say, usage

from naru_proto.tenants import key_digest
from naru_proto.v1 import worker_pb2 as wire

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
START_USAGE = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
    "output_tokens_details": {"thinking_tokens": 0},
    "service_tier": "standard",
}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}], **fields}


def stopped_by(reason: str) -> list[wire.Delta]:
    end = wire.Delta(finish_reason=STOP, stop_reason=reason, usage=usage(), request_done=True)
    return [wire.Delta(text="one", num_tokens=1), end]


async def test_a_whole_message_has_every_field(rig: Rig) -> None:
    await simple(rig, say("Hel", "lo", cached=3))
    response = await rig.post(PATH, asked())
    assert response.status_code == 200
    message = response.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {**START_USAGE, "input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 2},
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-naru-route"].startswith("w0;")


async def test_a_stream_has_the_events_of_the_same_message_in_order(rig: Rig) -> None:
    await simple(rig, say("Hel", "", "lo", cached=3))
    start, block, *deltas, block_end, end, stop = await stream(rig, PATH, asked())
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["usage"]) == ([], None, START_USAGE)
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [delta["delta"] for delta in deltas] == [
        {"type": "text_delta", "text": "Hel"},
        {"type": "text_delta", "text": "lo"},
    ]
    assert block_end == {"type": "content_block_stop", "index": 0}
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {**START_USAGE, "input_tokens": 2, "cache_read_input_tokens": 3, "output_tokens": 3}
    assert stop == {"type": "message_stop"}


async def test_an_answer_without_text_is_a_message_without_blocks(rig: Rig) -> None:
    await simple(rig, say())
    assert (await rig.post(PATH, asked())).json()["content"] == []
    assert types(await stream(rig, PATH, asked())) == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("deltas", "reason", "sequence"),
    [
        (stopped_by("END"), "stop_sequence", "END"),
        (stopped_by("token:7"), "end_turn", None),
        ([wire.Delta(text="one", finish_reason=LENGTH, usage=usage(), request_done=True)], "max_tokens", None),
    ],
)
async def test_it_says_why_it_stopped(rig: Rig, deltas: list[wire.Delta], reason: str, sequence: str | None) -> None:
    worker = await simple(rig, play(deltas))
    body = asked(stop_sequences=["END", "STOP"])
    message = (await rig.post(PATH, body)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert (await stream(rig, PATH, body))[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert list(worker.requests[0].sampling.stop) == ["END", "STOP"]


async def test_the_conversation_is_rendered_with_its_system_and_blocks(rig: Rig) -> None:
    worker = await simple(rig)
    blocks = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "c"}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    body = asked(system=system, messages=messages, temperature=0.5, top_p=0.9, top_k=40)
    assert (await rig.post(PATH, body)).status_code == 200
    (request,) = worker.requests
    assert request.text == (
        "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\na\nb\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    )
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (100, 0.5, 40)
    assert sampling.top_p == pytest.approx(0.9)


async def test_output_format_becomes_a_schema_of_the_text(rig: Rig) -> None:
    worker = await simple(rig, say('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    assert (await rig.post(PATH, asked(output_config={"format": form}))).status_code == 200
    assert json.loads(worker.requests[0].sampling.structured.json_schema) == schema
    assert worker.requests[0].sampling.structured.param == "output_config.format.schema"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no max_tokens", {"max_tokens": None}, "max_tokens is missing"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens is 0"),
    ("max_tokens type", {"max_tokens": "9"}, "max_tokens is '9'"),
    ("model", {"model": 5}, "model is 5"),
    ("messages", {"messages": []}, "messages is an array of 0"),
    ("role", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
    ("content", {"messages": [{"role": "user", "content": []}]}, "messages[0].content is"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type is 'image'"),
    ("text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is null"),
    ("half a pair", {"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
    ("temperature", {"temperature": "hot"}, "temperature is 'hot'"),
    ("top_p", {"top_p": 2}, "top_p is 2"),
    ("top_k", {"top_k": 1.5}, "top_k is 1.5"),
    ("stops", {"stop_sequences": "x"}, "stop_sequences is 'x'"),
    ("a stop", {"stop_sequences": ["a", ""]}, "stop_sequences[1] is ''"),
    ("system", {"system": 5}, "system is 5"),
    ("stream", {"stream": "yes"}, "stream is 'yes'"),
    ("thinking", {"thinking": {"type": "hard"}}, "thinking.type is 'hard'"),
    ("no budget", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens is null"),
    ("budget", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens is 5"),
    ("budget too high", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "not below max_tokens 100"),
    ("service_tier", {"service_tier": "gold"}, "service_tier is 'gold'"),
    ("metadata", {"metadata": {"user_id": 5}}, "metadata.user_id is 5"),
    ("mcp_servers", {"mcp_servers": [{}]}, "mcp_servers is an array of 1"),
    ("tool type", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type is 'web_search_20250305'"),
    ("tool name", {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name is 'a b'"),
    ("schema", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type is"),
    ("choice", {"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
    ("choice alone", {"tool_choice": {"type": "any"}}, "no tools"),
    ("output", {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type is 'xml'"),
    ("effort", {"output_config": {"effort": "huge"}}, "output_config.effort is 'huge'"),
]  # fmt: skip


async def test_bad_input_is_refused_in_the_form_of_the_api(rig: Rig) -> None:
    worker = await simple(rig)
    for name, fields, words in BAD:
        content = json.dumps(asked(**fields))
        response = await rig.client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, name
        error = response.json()
        assert error["type"] == "error"
        assert error["request_id"] == response.headers["request-id"]
        assert error["error"]["type"] == "invalid_request_error"
        assert words in error["error"]["message"], name
    assert worker.requests == []


async def test_errors_have_the_types_of_the_api_by_their_status(rig: Rig) -> None:
    await rig.publish_model()
    codes = {
        "rate_limit_exceeded": (429, "rate_limit_error"),
        "internal_error": (500, "api_error"),
    }
    at = iter(codes)

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        async for delta in fail(next(at))(request):
            yield delta

    await rig.start_worker(script=script)
    await rig.start_router()
    assert (await rig.post(PATH, asked(model="none"))).json()["error"]["type"] == "not_found_error"
    response = await rig.client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    for status, kind in codes.values():
        response = await rig.post(PATH, asked())
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


async def test_a_stream_that_fails_ends_with_an_error_and_no_success(rig: Rig) -> None:
    worker = await simple(rig)
    *_, last = events = await broken_stream(rig, worker, PATH, asked(), "Hel", **{"x-request-id": "mine"})
    assert types(events) == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert last["error"]["type"] == "api_error" and "it broke" in last["error"]["message"]
    assert last["request_id"] == "mine"


async def test_line_ends_of_other_alphabets_do_not_cut_an_event(rig: Rig) -> None:
    text = "a\u2028b\u2029c\x85d\r\ne"
    await simple(rig, say(*text))
    response = await rig.client.post(PATH, json=asked(stream=True))
    assert not set("\u2028\u2029\x85\r") & set(response.text)
    assert (
        "".join(event["delta"].get("text", "") for event in read_events(response.content) if "delta" in event) == text
    )


async def test_a_client_that_leaves_cancels_its_request(rig: Rig) -> None:
    worker = await simple(rig, hang("Hel"))
    async with rig.client.stream("POST", PATH, json={**asked(), "stream": True}) as response:
        async for _ in response.aiter_raw():
            break
    await worker.until(lambda: bool(worker.cancelled))


async def test_keys_may_come_as_anthropics_clients_send_them(rig: Rig, tmp_path: Any) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": [{"name": "a", "keys": [key_digest("nk-a")]}]}))
    await rig.publish_model()
    worker = await rig.start_worker()
    await rig.start_router(tenants_file=str(path))
    headers = {"x-api-key": "nk-a", "anthropic-version": "2023-06-01", "anthropic-beta": "any"}
    assert (await rig.client.post(PATH, json=asked(), headers=headers)).status_code == 200
    assert worker.requests[0].tenant == "a"
    response = await rig.client.post(PATH, json=asked(), headers={"x-api-key": "nk-b"})
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


async def count_words(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
    words = request.tokenize.text.split()
    delta = wire.Delta(finish_reason=STOP, usage=usage(), request_done=True)
    delta.tokenized.token_ids.extend(range(len(words)))
    yield delta


async def test_count_tokens_counts_the_rendered_prompt_and_generates_nothing(rig: Rig) -> None:
    worker = await simple(rig, count_words)
    body = {"model": MODEL, "system": "Be brief.", "messages": [{"role": "user", "content": "one two three"}]}
    response = await rig.post(COUNT, body)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 8})
    (request,) = worker.requests
    assert request.WhichOneof("task") == "tokenize" and not request.tokenize.add_special_tokens
    assert request.tokenize.text.startswith("<|im_start|>system\nBe brief.")
    refused = await rig.post(COUNT, {"model": MODEL, "messages": []})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


async def test_a_silent_stream_that_fails_later_is_no_success_either(rig: Rig) -> None:
    """A comment has sent the status: the error comes as an event, before any other."""
    go = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await go.wait()
        async for delta in fail("internal_error")(request):
            yield delta

    await simple(rig, script)
    seen = b""
    headers = {"x-naru-keepalive": "1"}
    async with rig.client.stream("POST", PATH, json={**asked(), "stream": True}, headers=headers) as response:
        async for data in response.aiter_raw():
            seen += data
            go.set()
    comments, _, rest = seen.rpartition(b": waiting\n\n")
    assert response.status_code == 200 and not comments.strip(b": waiting\n")
    assert types(read_events(rest)) == ["error"]
