"""Turns with thoughts and calls of tools in the Responses and the Messages API: told whole, streamed, and sent back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from named_events import broken_stream, stream, types
from router_rig import MODEL, Rig, info
from stub_worker import LENGTH, STOP, StubWorker, fail, say

from naru_proto.v1 import inference_pb2 as inf

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} as <tool_call>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}[assistant]{% if enable_thinking is defined and not enable_thinking %} brief{% endif %}"
)
THOUGHT = ("<think>", "Let me ", "see.", "</think>", "\n\n")
SAID = ("I ", "look.")
CALLED = ("<tool_call>", '\n{"name": "look", "arguments": {"pla', 'ce": "Pa', 'ris"}}\n', "</tool_call>")
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
TOOL = {"name": "look", "input_schema": SCHEMA}


async def started(rig: Rig, *texts: str, finish: inf.FinishReason = STOP) -> StubWorker:
    await rig.publish_model()
    worker = await rig.start_worker(script=say(*texts, finish=finish), facts=info(TEMPLATE))
    await rig.start_router()
    return worker


def message(**fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "max_tokens": 2000, "tools": [TOOL], "messages": [{"role": "user", "content": "hi"}]}
    return {**asked, "thinking": {"type": "enabled", "budget_tokens": 1024}, **fields}


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "tools": [FUNCTION], **fields}


async def test_a_message_has_thoughts_text_and_calls_and_so_has_its_stream(rig: Rig) -> None:
    worker = await started(rig, *THOUGHT, *SAID, *CALLED)
    made = (await rig.post(MESSAGES, message())).json()
    thinking, text, use = made["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"].strip() == "Let me see."
    assert text["type"] == "text" and text["text"].strip() == "I look."
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {"place": "Paris"})
    assert made["stop_reason"] == "tool_use"
    assert 0 < made["usage"]["output_tokens_details"]["thinking_tokens"] <= len(THOUGHT)
    assert '"name": "look"' in worker.requests[0].text.replace('\\"', '"')
    events = await stream(rig, MESSAGES, message())
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    partial = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert len(partial) > 1 and json.loads("".join(partial)) == {"place": "Paris"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thoughts_that_a_message_did_not_ask_for_are_turned_off_and_left_out(rig: Rig) -> None:
    worker = await started(rig, *THOUGHT, *SAID)
    made = (await rig.post(MESSAGES, message(thinking=None))).json()
    assert [block["type"] for block in made["content"]] == ["text"]
    assert worker.requests[0].text.endswith("[assistant] brief")
    assert made["usage"]["output_tokens"] == len(THOUGHT) + len(SAID)


async def test_a_response_has_reasoning_text_and_calls_and_so_has_its_stream(rig: Rig) -> None:
    await started(rig, *THOUGHT, *SAID, *CALLED)
    made = (await rig.post(RESPONSES, response())).json()
    reasoning, text, call = made["output"]
    assert reasoning["content"][0]["text"].strip() == "Let me see." and reasoning["summary"] == []
    assert text["content"][0]["text"].strip() == "I look."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"place": "Paris"})
    assert (made["status"], made["tools"][0]["name"]) == ("completed", "look")
    assert 0 < made["usage"]["output_tokens_details"]["reasoning_tokens"] <= len(THOUGHT)
    events = await stream(rig, RESPONSES, response())
    told = [name.removeprefix("response.") for name in types(events)]
    assert told == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    final = events[-1]["response"]["output"]
    assert [[item[k] for k in ("type", "status")] for item in final] == [
        [item[k] for k in ("type", "status")] for item in made["output"]
    ]
    assert final[0]["content"] == reasoning["content"] and final[2]["arguments"] == call["arguments"]


async def test_a_call_that_was_cut_is_told_as_far_as_it_came(rig: Rig) -> None:
    await started(rig, *CALLED[:2], finish=LENGTH)
    made = (await rig.post(MESSAGES, message())).json()
    assert made["stop_reason"] == "max_tokens"
    assert made["content"][-1]["input"] == {"INVALID_JSON": '{"pla'}
    item = (await rig.post(RESPONSES, response())).json()["output"][-1]
    assert (item["arguments"], item["status"]) == ('{"pla', "incomplete")


async def test_what_a_message_answered_goes_into_the_next_prompt(rig: Rig) -> None:
    worker = await started(rig, *THOUGHT, *SAID, *CALLED)
    made = (await rig.post(MESSAGES, message())).json()
    result = {"type": "tool_result", "tool_use_id": made["content"][2]["id"], "content": "sunny"}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": made["content"]}]
    assert (
        await rig.post(MESSAGES, message(messages=[*turns, {"role": "user", "content": [result]}]))
    ).status_code == 200
    prompt = worker.requests[-1].text
    assert "<call>look" in prompt and "Paris" in prompt
    assert "[tool] sunny|" in prompt


async def test_what_a_response_answered_goes_into_the_next_prompt(rig: Rig) -> None:
    worker = await started(rig, *THOUGHT, *SAID, *CALLED)
    output = (await rig.post(RESPONSES, response())).json()["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, *output, result]
    assert (await rig.post(RESPONSES, response(input=items))).status_code == 200
    prompt = worker.requests[-1].text
    assert "<call>look" in prompt and "Paris" in prompt and "see." in prompt
    assert "[tool] sunny|" in prompt


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_call_that_is_required_is_held_to_a_grammar(rig: Rig, path: str) -> None:
    worker = await started(rig, *CALLED)
    if path == MESSAGES:
        asked = message(tool_choice={"type": "tool", "name": "look"}, thinking=None)
    else:
        asked = response(tool_choice={"type": "function", "name": "look"})
    assert (await rig.post(path, asked)).status_code == 200
    assert worker.requests[0].sampling.HasField("structured")


async def test_offered_tools_are_those_that_are_allowed(rig: Rig) -> None:
    worker = await started(rig, *SAID)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    made = await rig.post(RESPONSES, response(tools=[FUNCTION, {**FUNCTION, "name": "touch"}], tool_choice=allowed))
    assert made.json()["tool_choice"] == allowed
    assert [tool["name"] for tool in made.json()["tools"]] == ["look", "touch"]
    assert "look" in worker.requests[0].text and "touch" not in worker.requests[0].text


async def test_an_error_in_a_call_ends_the_stream_without_success(rig: Rig) -> None:
    worker = await started(rig)
    events = await broken_stream(rig, worker, MESSAGES, message(), *CALLED[:3])
    assert events[-1]["type"] == "error" and not {"message_stop", "message_delta"} & set(types(events))
    events = await broken_stream(rig, worker, RESPONSES, response(), *CALLED[:3])
    assert types(events)[-2:] == ["error", "response.failed"]
    assert events[-1]["response"]["output"][-1]["status"] == "in_progress"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_model_that_stands_in_is_read_in_its_own_format(rig: Rig, path: str) -> None:
    await rig.publish_model(fallbacks=("small",))
    await rig.publish_model("small")
    await rig.start_worker("w0", fail("service_unavailable"))
    await rig.start_worker("w1", say(*THOUGHT, *SAID), models=("small",), facts=info(TEMPLATE))
    await rig.start_router()
    asked = message(tools=None) if path == MESSAGES else response(tools=None)
    made = (await rig.post(path, asked)).json()
    blocks = made["content"] if path == MESSAGES else made["output"]
    assert [block["type"] for block in blocks] == (
        ["thinking", "text"] if path == MESSAGES else ["reasoning", "message"]
    )
    told = types(await stream(rig, path, asked))
    assert ("response.reasoning_text.done" if path == RESPONSES else "content_block_stop") in told


async def test_openais_client_streams_calls(rig: Rig) -> None:
    await started(rig, *THOUGHT, *SAID, *CALLED)
    async with openai.AsyncOpenAI(base_url=f"{rig.client.base_url}/v1", api_key="none", max_retries=0) as client:
        async with client.responses.stream(model=MODEL, input="hi", tools=[FUNCTION]) as events:  # type: ignore[list-item]
            deltas = [e.delta async for e in events if e.type == "response.function_call_arguments.delta"]
            final = await events.get_final_response()
        call = final.output[-1]
        assert call.type == "function_call" and json.loads(call.arguments) == {"place": "Paris"}
        assert "".join(deltas) == call.arguments
