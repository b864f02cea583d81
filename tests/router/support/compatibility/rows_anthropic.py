"""Anthropic's Messages API: what its clients may send."""

from __future__ import annotations

import json
from typing import Any

from compatibility.known_worker import CHAT
from compatibility.row import Outcome, Row

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
API = "Anthropic messages"
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "it"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": CHAT, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}], **fields}


def blocks(*values: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(values)}]


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def turn(result: dict[str, Any]) -> list[Any]:
    return [*blocks(text("q")), *blocks(USE, role="assistant"), *blocks(result)]


def answers(outcome: Outcome) -> None:
    assert outcome.json["content"] == [{"type": "text", "text": "Paris is it."}]


def says(words: str) -> Any:
    def check(outcome: Outcome) -> None:
        assert words in outcome.sent.text

    return check


def check_message(outcome: Outcome) -> None:
    answers(outcome)
    message = outcome.json
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "end_turn")


def check_usage(outcome: Outcome) -> None:
    usage = outcome.json["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 3)


def check_stream(outcome: Outcome) -> None:
    assert [event["type"] for event in outcome.events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event["delta"]["text"] for event in outcome.events[2:5]) == "Paris is it."


def check_schema(outcome: Outcome) -> None:
    assert json.loads(outcome.sent.sampling.structured.json_schema) == {"type": "object"}


def check_count(outcome: Outcome) -> None:
    assert outcome.sent.WhichOneof("task") == "tokenize"
    assert outcome.json == {"input_tokens": len(outcome.sent.tokenize.text.split())}


def check_error(outcome: Outcome) -> None:
    assert outcome.json["error"]["type"] == "not_found_error"


def yes(feature: str, what: str, fields: dict[str, Any], check: Any, **more: Any) -> Row:
    return Row(API, feature, "yes", what, PATH, body(**fields), check, **more)


def ignored(feature: str, fields: dict[str, Any], what: str = "accepted", **more: Any) -> Row:
    return Row(API, feature, "ignored", what, PATH, body(**fields), answers, **more)


def refused(feature: str, what: str, fields: dict[str, Any], says: str, **more: Any) -> Row:
    return Row(API, feature, "refused", what, PATH, body(**fields), says=says, **more)


ROWS: list[Row] = [
    yes(
        "`messages`, roles `user` and `assistant`",
        "a chat; neighbours of one role become one message",
        {},
        check_message,
    ),
    yes(
        "`messages`, role `system`",
        "where it stands",
        {"messages": [{"role": "system", "content": "Be kind."}, *blocks(text("q"))]},
        says("system\nBe kind."),
    ),
    yes("`system`", "a text or blocks", {"system": [text("Be"), text("kind.")]}, says("system\nBe\nkind.")),
    yes("`max_tokens`", "at least 1; has to be there", {"max_tokens": 7}, lambda o: _is(o.sent.sampling.max_tokens, 7)),
    yes(
        "`stop_sequences`",
        "up to 16; `stop_sequence` says which one",
        {"stop_sequences": ["a", "b"]},
        lambda o: _is(list(o.sent.sampling.stop), ["a", "b"]),
    ),
    yes("`temperature`", "0 to 100", {"temperature": 0.5}, lambda o: _is(o.sent.sampling.temperature, 0.5)),
    yes("`top_p`", "0 to 1", {"top_p": 0.5}, lambda o: _is(o.sent.sampling.top_p, 0.5)),
    yes("`top_k`", "", {"top_k": 5}, lambda o: _is(o.sent.sampling.top_k, 5)),
    yes(
        "`seed`, `min_p`, penalties, `logit_bias`, `min_tokens`",
        "Naru's own, as in chat completions",
        {"seed": 5, "min_p": 0.5},
        lambda o: _is(o.sent.sampling.seed, 5),
    ),
    yes(
        "`stream`",
        "all events but `ping`; the input's tokens are told by `message_delta`",
        {"stream": True},
        check_stream,
    ),
    yes("`usage`", "`input_tokens` without the cached ones, which are `cache_read_input_tokens`", {}, check_usage),
    yes(
        "an answer that was begun: an assistant's message last",
        "it goes on",
        {"messages": [*blocks(text("q")), {"role": "assistant", "content": "It is"}]},
        lambda o: _is(o.sent.text.endswith("It is"), True),
    ),
    yes("`tools`", "the client's own", {"tools": [TOOL]}, says("look")),
    yes("`tool_choice` auto, any, tool, none", "", {"tools": [TOOL], "tool_choice": {"type": "none"}}, answers),
    yes(
        "`tool_result` blocks",
        "texts; with `is_error` they begin with `Error:`",
        {"messages": turn({**RESULT, "is_error": True})},
        says("Error:\nfound"),
    ),
    yes(
        "`thinking` enabled, adaptive",
        "for templates that read `enable_thinking`; blocks have no signature",
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        answers,
    ),
    yes(
        "`output_config.format`, `output_format`",
        "JSON that fits the schema",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        check_schema,
    ),
    Row(
        API,
        "`POST /v1/messages/count_tokens`",
        "yes",
        "counted by the model's tokenizer",
        COUNT,
        {"model": CHAT, "messages": blocks(text("one two"))},
        check_count,
    ),
    Row(
        API,
        "errors",
        "yes",
        "in Anthropic's form, with its types by status",
        PATH,
        body(model="none"),
        check_error,
        code=404,
    ),
    ignored(
        "`anthropic-version`, `anthropic-beta`", {}, "accepted, not needed", headers={"anthropic-version": "2023-06-01"}
    ),
    ignored(
        "`cache_control`",
        {"messages": blocks(text("q", cache_control={"type": "ephemeral"}))},
        "prefixes are cached without it",
    ),
    ignored("`metadata.user_id`", {"metadata": {"user_id": "me"}}),
    ignored("`service_tier`", {"service_tier": "auto"}, "auto and standard_only accepted"),
    ignored(
        "`thinking.budget_tokens`",
        {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1999}},
        "checked; does not bound what is thought",
    ),
    ignored(
        "`redacted_thinking` blocks",
        {
            "messages": [
                *blocks(text("q")),
                *blocks({"type": "redacted_thinking", "data": "x"}, text("a"), role="assistant"),
                *blocks(text("r")),
            ]
        },
        "left out of the prompt",
    ),
    ignored("`inference_geo`, `speed`, `user_profile_id`", {"speed": "fast", "inference_geo": "eu"}),
    refused(
        "`image` and `document` blocks",
        "models here read text alone",
        {"messages": blocks({"type": "image", "source": {}})},
        "content[0].type",
    ),
    refused(
        "tools that the server runs",
        "",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
    ),
    refused("`mcp_servers`", "", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    refused("`container`", "", {"container": "c"}, "container"),
    refused("`context_management`", "nothing is edited", {"context_management": {"edits": [{}]}}, "context_management"),
    Row(
        API,
        "`POST /v1/messages/batches`",
        "refused",
        "use OpenAI's files and batches",
        "/v1/messages/batches",
        {"requests": []},
        code=404,
    ),
]


def _is(found: object, expected: object) -> None:
    assert found == expected
