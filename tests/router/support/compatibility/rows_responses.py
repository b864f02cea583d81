"""OpenAI's Responses API: what its clients may send."""

from __future__ import annotations

import json
from typing import Any

from compatibility.known_worker import CHAT
from compatibility.row import Outcome, Row

PATH = "/v1/responses"
API = "OpenAI responses"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
NO_ID = "resp_0123456789abcdef01234567"
SCHEMA = {"type": "json_schema", "name": "thing", "schema": {"type": "object"}, "strict": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT, "input": "hi", **fields}


def said(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "output_text" if role == "assistant" else "input_text", "text": words}]}


def text_of(outcome: Outcome) -> str:
    return "".join(part["text"] for item in outcome.json["output"] for part in item["content"])


def answers(outcome: Outcome) -> None:
    assert text_of(outcome) == "Paris is it."


def says(words: str) -> Any:
    def check(outcome: Outcome) -> None:
        assert words in outcome.sent.text

    return check


def tells(name: str, value: object) -> Any:
    """The response repeats it."""

    def check(outcome: Outcome) -> None:
        answers(outcome)
        assert outcome.json[name] == value

    return check


def samples(name: str, value: object) -> Any:
    def check(outcome: Outcome) -> None:
        assert getattr(outcome.sent.sampling, name) == value

    return check


def check_response(outcome: Outcome) -> None:
    answers(outcome)
    assert (outcome.json["object"], outcome.json["status"]) == ("response", "completed")


def check_usage(outcome: Outcome) -> None:
    usage = outcome.json["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["input_tokens_details"]["cached_tokens"] == 2


def check_stream(outcome: Outcome) -> None:
    names = [event["type"].removeprefix("response.") for event in outcome.events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[4:7] == ["output_text.delta"] * 3
    assert names[7:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in outcome.events] == list(range(11))


def check_schema(outcome: Outcome) -> None:
    assert json.loads(outcome.sent.sampling.structured.json_schema) == {"type": "object"}
    assert outcome.json["text"]["format"] == SCHEMA


def check_logprobs(outcome: Outcome) -> None:
    logprobs = outcome.json["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["Paris", " is", " it."]


def check_count(outcome: Outcome) -> None:
    assert outcome.json["input_tokens"] == len(outcome.sent.tokenize.text.split())


def check_gone(outcome: Outcome) -> None:
    assert "no response is stored" in outcome.json["error"]["message"]


def yes(feature: str, what: str, fields: dict[str, Any], check: Any, **more: Any) -> Row:
    return Row(API, feature, "yes", what, PATH, body(**fields), check, **more)


def ignored(feature: str, fields: dict[str, Any], what: str = "accepted") -> Row:
    return Row(API, feature, "ignored", what, PATH, body(**fields), answers)


def refused(feature: str, what: str, fields: dict[str, Any], param: str) -> Row:
    return Row(API, feature, "refused", what, PATH, body(**fields), param=param)


ROWS: list[Row] = [
    yes("`input` as a text", "a user's message", {}, check_response),
    yes(
        "`input` as items: messages",
        "all four roles; texts",
        {"input": [said("user", "a"), said("assistant", "b"), said("user", "c")]},
        says("user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"),
    ),
    yes(
        "`input` items `function_call`, `function_call_output`",
        "an output needs its call before it",
        {"input": [said("user", "a"), CALL, RESULT]},
        says("found"),
    ),
    yes(
        "`input` items `reasoning`",
        "given to templates that show what was thought; `encrypted_content` alone says nothing",
        {
            "input": [
                said("user", "a"),
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                said("assistant", "b"),
                said("user", "c"),
            ]
        },
        says("assistant\nb"),
    ),
    yes(
        "`instructions`",
        "the system's message; not carried over from a stored response",
        {"instructions": "Be kind."},
        says("system\nBe kind."),
    ),
    yes(
        "`max_output_tokens`",
        "at least 1; a response that was cut is `incomplete`",
        {"max_output_tokens": 7},
        samples("max_tokens", 7),
    ),
    yes("`temperature`", "0 to 100", {"temperature": 0.5}, samples("temperature", 0.5)),
    yes("`top_p`", "0 to 1", {"top_p": 0.5}, samples("top_p", 0.5)),
    yes(
        "`top_k`, `min_p`, `seed`, penalties, `logit_bias`, `min_tokens`",
        "Naru's own, as in chat completions",
        {"seed": 5},
        samples("seed", 5),
    ),
    yes(
        "`stream`",
        "all events of text, reasoning and function calls, numbered, in OpenAI's order",
        {"stream": True},
        check_stream,
    ),
    yes("`usage`", "with cached and reasoning tokens", {}, check_usage),
    yes("`tools` of type function", "", {"tools": [TOOL]}, says("look")),
    yes(
        "`tool_choice` auto, none, required, a function, `allowed_tools`",
        "",
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        },
        says("look"),
    ),
    yes("`text.format` json_schema", "JSON that fits, strict or not", {"text": {"format": SCHEMA}}, check_schema),
    yes(
        "`text.format` json_object",
        "any JSON object",
        {"text": {"format": {"type": "json_object"}}},
        lambda o: _is(o.sent.sampling.structured.json_object, True),
    ),
    yes(
        "`reasoning.effort`",
        "for templates that read `reasoning_effort`; none turns thinking off",
        {"reasoning": {"effort": "low"}},
        tells("reasoning", {"effort": "low", "summary": None}),
    ),
    yes(
        "`include` of `message.output_text.logprobs`, `top_logprobs`",
        "log probabilities of the text's tokens",
        {"include": ["message.output_text.logprobs"]},
        check_logprobs,
    ),
    yes("`store`", "false where absent; needs the router's `files_dir`", {"store": True}, tells("store", True)),
    yes("`metadata`", "kept with the response", {"metadata": {"a": "b"}}, tells("metadata", {"a": "b"})),
    yes(
        "`prompt_cache_key`",
        "requests with one key meet on one worker",
        {"prompt_cache_key": "k"},
        tells("prompt_cache_key", "k"),
    ),
    Row(
        API,
        "`GET`, `DELETE /v1/responses/{id}`, `GET …/input_items`",
        "yes",
        "stored ones, of the caller alone",
        f"{PATH}/{NO_ID}",
        None,
        check_gone,
        code=404,
    ),
    Row(
        API,
        "`POST /v1/responses/input_tokens`",
        "yes",
        "counted by the model's tokenizer",
        f"{PATH}/input_tokens",
        body(),
        check_count,
    ),
    ignored("`user`, `safety_identifier`", {"user": "me"}),
    ignored("`max_tool_calls`", {"max_tool_calls": 3}, "it bounds tools that the server runs, of which there are none"),
    ignored(
        "`reasoning.summary`",
        {"reasoning": {"summary": "auto"}},
        "what was thought is told itself, as `reasoning_text`",
    ),
    ignored(
        "`include` of anything else", {"include": ["reasoning.encrypted_content"]}, "nothing of it is ever made here"
    ),
    ignored("`service_tier` auto, default", {"service_tier": "auto"}),
    ignored("`prompt_cache_retention`, `prompt_cache_options`", {"prompt_cache_retention": "24h"}),
    refused(
        "`previous_response_id` of what is not stored",
        "a stored one of the caller is gone on from",
        {"previous_response_id": NO_ID},
        "previous_response_id",
    ),
    refused("`background` true", "use a batch, or stream", {"background": True}, "background"),
    refused("`conversation`", "", {"conversation": "conv_1"}, "conversation"),
    refused("`prompt`", "no templates of prompts are stored", {"prompt": {"id": "p"}}, "prompt"),
    refused("`truncation` auto", "nothing is dropped from a conversation", {"truncation": "auto"}, "truncation"),
    refused("`context_management`", "", {"context_management": [{"type": "compaction"}]}, "context_management"),
    refused("`moderation`", "", {"moderation": {"model": "m"}}, "moderation"),
    refused("`text.verbosity` but medium", "", {"text": {"verbosity": "low"}}, "text.verbosity"),
    refused(
        "tools that the server runs",
        "web search, files, code, MCP, computers, shells",
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
    ),
    refused("custom tools", "", {"tools": [{"type": "custom", "name": "c"}]}, "tools[0].type"),
    refused(
        "images, files and audio in `input`",
        "models here read text alone",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    refused(
        "`input` items of other types, `item_reference`",
        "",
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0].type",
    ),
    refused(
        "`stream_options.include_obfuscation`",
        "",
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    refused("`service_tier` of other names", "", {"service_tier": "flex"}, "service_tier"),
    Row(
        API,
        "`POST /v1/responses/{id}/cancel`",
        "refused",
        "there is nothing in the background",
        f"{PATH}/{NO_ID}/cancel",
        {},
        code=404,
    ),
]


def _is(found: object, expected: object) -> None:
    assert found == expected
