"""Reasoning, options of templates, forms of answers, and the best of several: for clients and for the worker."""

from __future__ import annotations

from typing import Any

import pytest
from chat_support import CALL_B, LLAMA, OPENED, THINKER, TOOLS, TURNS, both, chat_rig, refused_param
from router_rig import CHAT, CHATML, COMPLETION, Rig, body
from stub_worker import LENGTH, STOP, play, say, usage

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire


async def test_reasoning_that_the_prompt_has_opened_goes_on_in_the_answer(rig: Rig) -> None:
    worker = await chat_rig(rig, say("hm", "\n</th", "ink>", "\n\n", "42"), OPENED)
    message, reason = await both(rig)
    assert (message["reasoning_content"], message["content"], reason) == ("hm", "42", "stop")
    # A form is kept by what comes after it.
    message, _ = await both(rig, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {}}})
    structured = worker.requests[-1].sampling.structured
    assert structured.param == "response_format" and "</think>" in structured.grammar.replace("\\", "")
    worker.script = say("cut", finish=LENGTH)
    message, reason = await both(rig)
    assert (message["reasoning_content"], message["content"], reason) == ("cut", None, "length")


async def test_thinking_is_turned_off_by_options_of_the_template(rig: Rig) -> None:
    worker = await chat_rig(rig, say("a <think> b"), THINKER)
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message, _ = await both(rig, **fields)
        assert message["content"] == "a <think> b" and "reasoning" not in message
        assert worker.requests[-1].text.endswith("<think></think>")
    await both(rig, reasoning_effort="high")
    assert worker.requests[-1].text == "<user>hi"


async def test_options_reach_the_template(rig: Rig) -> None:
    template = "{{ mood }} {{ documents | tojson }} {{ reasoning_effort }} {{ add_generation_prompt }}|" + TURNS
    worker = await chat_rig(rig, template=template)
    fields: dict[str, Any] = {
        "chat_template_kwargs": {"mood": {"a": [1, None]}},
        "documents": [{"title": "t"}],
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    for _ in range(2):
        assert (await rig.post(CHAT, body(CHAT, **fields))).status_code == 200
        assert worker.requests[-1].text == '{\'a\': [1, None]} [{"title": "t"}] low False|<user>hi'
    # Without options the template is filled as ever, before and after.
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200
    assert worker.requests[-1].text == " null  True|<user>hi"


async def test_the_last_message_of_the_assistant_goes_on(rig: Rig) -> None:
    worker = await chat_rig(rig, template=CHATML)
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]
    reply = await rig.post(CHAT, body(CHAT, messages=messages, continue_final_message=True))
    assert reply.status_code == 200
    assert worker.requests[-1].text == "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n1, 2,"
    both_set = body(CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused_param(await rig.post(CHAT, both_set)) == "continue_final_message"


FORMS: list[tuple[dict[str, Any], inf.StructuredOutput]] = [
    ({"response_format": {"type": "json_object"}}, inf.StructuredOutput(json_object=True, param="response_format")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "t", "strict": True, "schema": {"a": "č"}},
            }
        },
        inf.StructuredOutput(json_schema='{"a": "č"}', param="response_format"),
    ),
    ({"guided_json": '{"a": 1}'}, inf.StructuredOutput(json_schema='{"a": 1}', param="guided_json")),
    ({"guided_regex": "a+"}, inf.StructuredOutput(regex="a+", param="guided_regex")),
    ({"guided_choice": ["a", "b"]}, inf.StructuredOutput(choice={"texts": ["a", "b"]}, param="guided_choice")),
    ({"guided_grammar": "start: x"}, inf.StructuredOutput(grammar="start: x", param="guided_grammar")),
    ({"structured_outputs": {"regex": "b"}}, inf.StructuredOutput(regex="b", param="structured_outputs.regex")),
    (
        {"structured_outputs": {"json_object": True}},
        inf.StructuredOutput(json_object=True, param="structured_outputs.json_object"),
    ),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_forms_of_answers_reach_the_worker(rig: Rig, path: str) -> None:
    worker = await chat_rig(rig, template=CHATML)
    for fields, expected in FORMS:
        reply = await rig.post(path, body(path, **fields))
        assert reply.status_code == 200, reply.text
        assert worker.requests[-1].sampling.structured == expected
    twice = body(path, guided_regex="a", response_format={"type": "json_object"})
    assert refused_param(await rig.post(path, twice)) == "guided_regex"


async def test_a_form_beside_tools_is_kept_where_the_two_can_be_told_apart(rig: Rig) -> None:
    worker = await chat_rig(rig, say(*CALL_B))
    form = {"response_format": {"type": "json_object"}}
    await both(rig, tools=TOOLS, **form)
    structured = worker.requests[-1].sampling.structured
    assert structured.param == "response_format" and "(calls | answer)" in structured.grammar
    await both(rig, tools=TOOLS, tool_choice="required", **form)
    assert worker.requests[-1].sampling.structured.param == "tools"
    refused = await rig.post(CHAT, body(CHAT, tools=TOOLS, guided_regex="a"))
    assert refused_param(refused) == "guided_regex"


@pytest.mark.parametrize("template", [CHATML, LLAMA])
async def test_an_answer_in_json_that_was_asked_for_is_no_call_and_a_required_call_is_one(
    rig: Rig, template: str
) -> None:
    text = '{"name": "clock", "parameters": {}}'
    await chat_rig(rig, say(*text), template)
    form = {"response_format": {"type": "json_object"}}
    if template == CHATML:
        message, reason = await both(rig, tools=TOOLS, **form)
        assert (message["content"], reason) == (text, "stop")
    message, reason = await both(rig, tools=TOOLS, tool_choice="required", **form)
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"} and reason == "tool_calls"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_the_best_of_several_answers_are_given(rig: Rig, path: str) -> None:
    means = [-2.0, -0.5, -3.0, -1.0]

    async def script(request: wire.GenerateRequest) -> Any:
        assert request.sampling.n == 4 and request.sampling.logprobs == 0
        for index, mean in enumerate(means):
            for shift in (-0.25, 0.25):
                delta = wire.Delta(index=index, text=str(index), num_tokens=1)
                delta.logprobs.add().chosen.CopyFrom(inf.TokenLogprob(token="x", logprob=mean + shift))
                yield delta
            yield wire.Delta(index=index, finish_reason=STOP)
        yield wire.Delta(index=0, usage=usage(completion=8), request_done=True)

    await chat_rig(rig, script, CHATML)
    reply = (await rig.post(path, body(path, best_of=4, n=2))).json()
    texts = [c["text"] if path == COMPLETION else c["message"]["content"] for c in reply["choices"]]
    assert texts == ["11", "33"] and [c["index"] for c in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 8 and all(c["logprobs"] is None for c in reply["choices"])
    for fields in ({"best_of": 4, "stream": True}, {"best_of": 1, "n": 2}):
        assert refused_param(await rig.post(path, body(path, **fields))) == "best_of"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_beams_are_the_workers(rig: Rig, path: str) -> None:
    worker = await chat_rig(rig, say("a"), CHATML)
    cases: list[tuple[dict[str, Any], tuple[int, int, float]]] = [
        ({"use_beam_search": True, "n": 3}, (3, 3, 0.0)),
        ({"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.5}, (4, 2, 0.5)),
        ({"beam_width": 5}, (5, 1, 0.0)),
        ({"use_beam_search": False, "length_penalty": 1.0}, (0, 1, 0.0)),
    ]
    for fields, (width, n, penalty) in cases:
        assert (await rig.post(path, body(path, **fields))).status_code == 200
        sampling = worker.requests[-1].sampling
        assert (sampling.beam_width, sampling.n or 1, sampling.length_penalty) == (width, n, penalty)
    for fields, param in (
        ({"beam_width": 2, "n": 3}, "beam_width"),
        ({"beam_width": 2, "best_of": 3}, "best_of"),
        ({"beam_width": 2, "use_beam_search": False}, "beam_width"),
        ({"use_beam_search": True, "n": 40}, "beam_width"),
    ):
        assert refused_param(await rig.post(path, body(path, **fields))) == param


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_log_probabilities_of_the_prompt_are_told_where_asked_for(rig: Rig, path: str) -> None:
    first = wire.Delta(text="a", num_tokens=1)
    for number, logprob in ((5, 0.0), (6, -0.5)):
        token = inf.TokenLogprob(token_id=number, token=f"t{number}", logprob=logprob, rank=2)
        best = inf.TokenLogprob(token_id=9, token="t9", logprob=-0.25, rank=1)
        first.prompt_logprobs.add(chosen=token, top=[best])
    last = wire.Delta(finish_reason=STOP, usage=usage(), request_done=True)
    worker = await chat_rig(rig, play([first, last]), CHATML)
    reply = (await rig.post(path, body(path, prompt_logprobs=1))).json()
    told = reply["prompt_logprobs"] if path == CHAT else reply["choices"][0]["prompt_logprobs"]
    assert told[0] is None and told[1]["6"] == {"logprob": -0.5, "rank": 2, "decoded_token": "t6"}
    assert told[1]["9"]["rank"] == 1 and worker.requests[-1].sampling.prompt_logprobs == 1
    refused = await rig.post(path, body(path, prompt_logprobs=1, stream=True))
    assert refused_param(refused) == "prompt_logprobs"
    assert "prompt_logprobs" not in (await rig.post(path, body(path))).text
