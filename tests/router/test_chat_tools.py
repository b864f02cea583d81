"""Calls of tools over HTTP against a stub worker: whole and streamed, and what the worker gets."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_support import (
    CALL_A,
    CALL_B,
    CHANNELS,
    MISTRAL,
    NAMED,
    NO_SYSTEM,
    PRICE,
    THINKER,
    TOOLS,
    TWO_CALLS,
    both,
    chat_rig,
    deltas_of,
    message_of,
    reasons_of,
    refused_param,
    without_ids,
)
from router_rig import CHAT, CHATML, MODEL, Rig, body, events
from stub_worker import LENGTH, STOP, play, say, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire

STREAM = pytest.mark.parametrize("stream", [False, True])


async def test_two_calls_have_ids_names_and_exact_arguments(rig: Rig) -> None:
    await chat_rig(rig, say(*TWO_CALLS))
    message, reason = await both(rig, tools=TOOLS)
    assert (message["content"], reason) == (None, "tool_calls")
    first, second = message["tool_calls"]
    assert first["id"] != second["id"] and first["id"].startswith("call_")
    assert first["function"] == {"name": "stock_price", "arguments": '{"ticker": "A\\n\\u2028B"}'}
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    assert json.loads(first["function"]["arguments"]) == {"ticker": "A\n\u2028B"}


async def test_text_reasoning_and_calls_come_in_their_order(rig: Rig) -> None:
    answer = f"<think>\nA share, <i>see\n</think>\n\nI look < it up.\n{CALL_B}"
    await chat_rig(rig, say(*[answer[i : i + 3] for i in range(0, len(answer), 3)]), THINKER)
    message, reason = await both(rig, tools=TOOLS)
    assert (message["reasoning_content"], message["content"], reason) == (
        "A share, <i>see",
        "I look < it up.",
        "tool_calls",
    )
    kinds = [next(iter(d)) for d in deltas_of(await rig.stream(CHAT, body(CHAT, tools=TOOLS)))[1:-1]]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    hidden, _ = await both(rig, tools=TOOLS, include_reasoning=False)
    assert "reasoning" not in hidden and hidden["content"] == "I look < it up."


async def test_an_answer_without_a_call_is_text_and_ends_with_stop(rig: Rig) -> None:
    await chat_rig(rig, say("No ", "<to", "ol ", "needed ", "\n"))
    assert await both(rig, tools=TOOLS) == (
        {"role": "assistant", "content": "No <tool needed \n", "refusal": None},
        "stop",
    )


async def test_a_call_that_is_cut_ends_with_length_and_what_came_of_it(rig: Rig) -> None:
    cut = CALL_A[: CALL_A.index("A\\n") + 1]
    await chat_rig(rig, say(*cut, finish=LENGTH))
    message, reason = await both(rig, tools=TOOLS)
    assert reason == "length" and message["tool_calls"][0]["function"]["arguments"] == '{"ticker": "A'


async def test_what_looks_like_a_call_and_is_none_is_text(rig: Rig) -> None:
    text = "<tool_call>\n{name: clock}\n</tool_call>"
    await chat_rig(rig, say(*text))
    message, reason = await both(rig, tools=TOOLS)
    assert (message["content"], reason, "tool_calls" in message) == (text, "stop", False)


async def test_choices_of_one_answer_call_for_themselves(rig: Rig) -> None:
    texts = ["hi", CALL_B, CALL_A]
    deltas = [wire.Delta(index=i, text=c, num_tokens=1) for i, text in enumerate(texts) for c in text]
    deltas += [wire.Delta(index=i, finish_reason=STOP) for i in (2, 0)]
    deltas += [wire.Delta(index=1, finish_reason=STOP, usage=usage(), request_done=True)]
    await chat_rig(rig, play(deltas))
    whole = (await rig.post(CHAT, body(CHAT, tools=TOOLS, n=3))).json()["choices"]
    assert [c["finish_reason"] for c in whole] == ["stop", "tool_calls", "tool_calls"]
    chunks = await rig.stream(CHAT, body(CHAT, tools=TOOLS, n=3))
    for choice in whole:
        assert without_ids(message_of(chunks, choice["index"])) == without_ids(choice["message"])
    assert sorted(reasons_of(chunks)) == [(0, "stop"), (1, "tool_calls"), (2, "tool_calls")]


async def test_usage_comes_only_when_asked_for_beside_calls_too(rig: Rig) -> None:
    await chat_rig(rig, say(*CALL_B))
    plain = await rig.stream(CHAT, body(CHAT, tools=TOOLS))
    asked = await rig.stream(CHAT, body(CHAT, tools=TOOLS, stream_options={"include_usage": True}))
    assert all("usage" not in e and e["choices"] for e in plain[:-1])
    assert asked[-2]["choices"] == [] and asked[-2]["usage"]["completion_tokens"] == len(CALL_B)
    assert all(e["usage"] is None for e in asked[:-2]) and len(asked) == len(plain) + 1
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in asked[:-1]}) == 1


@STREAM
async def test_every_token_has_its_logprob_once_beside_calls_too(rig: Rig, stream: bool) -> None:
    deltas = []
    for char in f"hi {CALL_B}":
        delta = wire.Delta(text=char, num_tokens=1)
        delta.logprobs.add().chosen.CopyFrom(inf.TokenLogprob(token=char, bytes=char.encode(), logprob=-0.5))
        deltas.append(delta)
    deltas.append(wire.Delta(finish_reason=STOP, usage=usage(), request_done=True))
    await chat_rig(rig, play(deltas))
    fields = body(CHAT, tools=TOOLS, logprobs=True)
    if stream:
        choices = [c for e in (await rig.stream(CHAT, fields))[:-1] for c in e["choices"]]
    else:
        choices = (await rig.post(CHAT, fields)).json()["choices"]
    tokens = [t["token"] for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert "".join(tokens) == f"hi {CALL_B}"


@pytest.mark.parametrize("texts", [TWO_CALLS, ["hi"], [f"<think>x</think>a{CALL_B}"]])
async def test_the_official_client_reads_calls(rig: Rig, texts: list[str]) -> None:
    await chat_rig(rig, say(*texts), THINKER)
    url = f"http://127.0.0.1:{rig.app.http_port}/v1"
    messages: Any = [{"role": "user", "content": "hi"}]
    tools: Any = TOOLS
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            final = await stream.get_final_completion()
    expected = whole.choices[0].message
    message = final.choices[0].message
    assert message.content == expected.content and final.choices[0].finish_reason == whole.choices[0].finish_reason
    called = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
    assert called == [
        (c.function.name, c.function.arguments) for c in expected.tool_calls or [] if c.type == "function"
    ]
    assert len(called) == "".join(texts).count("<tool_call>")


async def test_the_older_form_of_calls_is_answered_in_its_own_words(rig: Rig) -> None:
    worker = await chat_rig(rig, say(*TWO_CALLS))
    functions = [tool["function"] for tool in TOOLS]
    whole = (await rig.post(CHAT, body(CHAT, functions=functions))).json()["choices"][0]
    assert whole["finish_reason"] == "function_call"
    expected = {"name": "stock_price", "arguments": '{"ticker": "A\\n\\u2028B"}'}
    assert whole["message"]["function_call"] == expected and whole["message"]["content"] is None
    chunks = await rig.stream(CHAT, body(CHAT, functions=functions))
    pieces = [d["function_call"] for d in deltas_of(chunks)[1:-1]]
    assert pieces[0] == {"name": "stock_price", "arguments": ""} and all(set(p) == {"arguments"} for p in pieces[1:])
    assert "".join(p["arguments"] for p in pieces) == expected["arguments"]
    assert reasons_of(chunks) == [(0, "function_call")]
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}},
        {"role": "function", "name": "clock", "content": "noon"},
    ]
    fields = body(CHAT, functions=functions, function_call={"name": "clock"}, messages=history)
    assert (await rig.post(CHAT, fields)).status_code == 200
    assert worker.requests[-1].text.endswith("[call_of_clock clock {}]<tool>noon(for call_of_clock)")
    assert "clock" in worker.requests[-1].sampling.structured.grammar


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "stock_price", "arguments": '{"ticker": "A", "n": 1.0}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
]


async def test_the_template_gets_tools_calls_and_results(rig: Rig) -> None:
    worker = await chat_rig(rig)
    assert (await rig.post(CHAT, body(CHAT, tools=TOOLS, messages=HISTORY))).status_code == 200
    lines = worker.requests[-1].text.split("\n")
    assert json.loads(lines[0]) == PRICE
    no_parameters = {"type": "object", "properties": {}}
    assert json.loads(lines[1]) == {"type": "function", "function": {"name": "clock", "parameters": no_parameters}}
    assert lines[2] == (
        '<user>What is it?<assistant>[c1 stock_price {"ticker": "A", "n": 1.0}][c2 clock "{broken"]'
        "<tool>42(for c1)<tool>noon(for c2)"
    )
    # Where no tool may be called the template sees none, and nothing is read as a call.
    assert (await rig.post(CHAT, body(CHAT, tools=TOOLS, tool_choice="none"))).status_code == 200
    assert worker.requests[-1].text == "<user>hi"


async def test_a_template_that_prints_tools_without_end_is_stopped(rig: Rig) -> None:
    worker = await chat_rig(rig, template="{% for i in range(9999) %}{{ tools | tojson }}{% endfor %}{# <tool_call> #}")
    large = [{"type": "function", "function": {"name": "f", "description": "x" * 20_000}}]
    assert refused_param(await rig.post(CHAT, body(CHAT, tools=large))) == "messages"
    assert worker.requests == []


async def test_where_nothing_may_be_called_a_call_is_text(rig: Rig) -> None:
    await chat_rig(rig, say(*CALL_B))
    without: list[dict[str, Any]] = [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}]
    for fields in without:
        message, reason = await both(rig, **fields)
        assert (message["content"], reason, "tool_calls" in message) == (CALL_B, "stop", False)


async def test_choices_of_tools_are_kept_by_a_grammar(rig: Rig) -> None:
    worker = await chat_rig(rig, say(*CALL_B))

    async def grammar_of(**fields: Any) -> str:
        message, reason = await both(rig, tools=TOOLS, **fields)
        assert reason == "tool_calls" and message["tool_calls"]
        one, other = [request.sampling.structured for request in worker.requests[-2:]]
        assert one == other and one.param == ("tools" if one.grammar else "")
        return str(one.grammar)

    assert await grammar_of() == "" == await grammar_of(tool_choice="auto", parallel_tool_calls=True)
    many = await grammar_of(tool_choice="required")
    assert "clock" in many and "stock_price" in many and '"ticker"' in many and " call)*" in many
    one = await grammar_of(tool_choice="required", parallel_tool_calls=False)
    assert " call)*" not in one
    named = await grammar_of(tool_choice=NAMED)
    assert "clock" in named and "stock_price" not in named and " call)*" not in named
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    reply = await rig.post(CHAT, body(CHAT, tools=strict))
    assert reply.status_code == 200 and "[lazy]" in worker.requests[-1].sampling.structured.grammar


async def test_at_most_one_call_where_calls_may_not_be_parallel(rig: Rig) -> None:
    await chat_rig(rig, say(*TWO_CALLS))
    message, reason = await both(rig, tools=TOOLS, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["stock_price"] and reason == "tool_calls"


async def test_a_template_without_tools_is_told_of_them_in_the_system_message(rig: Rig) -> None:
    worker = await chat_rig(rig, say(*CALL_B), CHATML)
    message, reason = await both(rig, tools=TOOLS)
    assert message["tool_calls"][0]["function"]["name"] == "clock" and reason == "tool_calls"
    system, user, assistant = worker.requests[-1].text.split("<|im_start|>")[1:]
    assert system.startswith("system\n") and json.dumps(PRICE["function"]) in system and "<tool_call>" in system
    assert (user, assistant) == ("user\nhi<|im_end|>\n", "assistant\n")
    own = [{"role": "system", "content": "Be brief."}, *HISTORY]
    assert (await rig.post(CHAT, body(CHAT, tools=TOOLS, messages=own))).status_code == 200
    system, user, calls, results, _ = worker.requests[-1].text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n") and user == "user\nWhat is it?<|im_end|>\n"
    assert calls.count("<tool_call>") == 2 and '"arguments": {"ticker": "A", "n": 1.0}' in calls
    assert results.startswith("user\n<tool_response>\n42\n</tool_response>\n<tool_response>\nnoon\n")


async def test_a_template_that_refuses_system_messages_is_told_in_the_users(rig: Rig) -> None:
    worker = await chat_rig(rig, say("x"), NO_SYSTEM)
    assert (await rig.post(CHAT, body(CHAT, tools=TOOLS))).status_code == 200
    assert worker.requests[-1].text.startswith("<user>You can call") and worker.requests[-1].text.endswith("\n\nhi")


async def test_marks_that_are_special_tokens_are_shown_and_opened_by_the_prompt(rig: Rig) -> None:
    calls = '[{"name": "clock", "arguments": {}}]'
    worker = await chat_rig(rig, say(*calls), MISTRAL)
    message, reason = await both(rig, tools=TOOLS, tool_choice="required", messages=HISTORY)
    assert message["tool_calls"][0]["function"]["name"] == "clock" and reason == "tool_calls"
    ids = {call["id"] for call in message["tool_calls"]}
    assert all(len(it) == 9 and it.isalnum() for it in ids)
    request = worker.requests[-1]
    assert request.show_special_tokens and request.text.endswith("[TOOL_CALLS]")
    told = request.text.split("<assistant>[")[1].split(" ")[0]
    assert len(told) == 9 and f"(for {told})" in request.text, "ids of any form become ids that the template takes"
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200
    assert not worker.requests[-1].show_special_tokens


async def test_channels_are_told_apart(rig: Rig) -> None:
    answer = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.clock "
        "<|constrain|>json<|message|>{}"
    )
    worker = await chat_rig(rig, say(*answer), CHANNELS)
    message, reason = await both(rig, tools=TOOLS)
    assert (message["reasoning"], reason) == ("hm", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    assert worker.requests[-1].show_special_tokens
    worker.script = say("{", "}")
    message, reason = await both(rig, tools=TOOLS, tool_choice=NAMED)
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"} and reason == "tool_calls"
    assert worker.requests[-1].text.endswith("to=functions.clock <|constrain|>json<|message|>")
    message, reason = await both(rig, response_format={"type": "json_object"})
    assert (message["content"], reason) == ("{}", "stop")
    assert worker.requests[-1].text.endswith("<|channel|>final<|message|>")


async def test_a_call_is_framed_like_any_other_event(rig: Rig) -> None:
    text = '<tool_call>{"name": "clock", "arguments": {"x": "a\u2028\u0085data: \r\n\\n"}}</tool_call>'
    await chat_rig(rig, say(*text))
    response = await rig.client.post(CHAT, json=body(CHAT, tools=TOOLS, stream=True))
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    calls = message_of(events(response.content))["tool_calls"]
    assert calls[0]["function"]["arguments"] == '{"x": "a\u2028\u0085data: \r\n\\n"}'
