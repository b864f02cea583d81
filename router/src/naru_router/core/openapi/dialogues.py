"""OpenAI's Responses and Anthropic's Messages. Pure.

What an item or a content block may hold is told in docs/responses.md and docs/anthropic.md; here are its outlines.
"""

from __future__ import annotations

from naru_router.core.openapi.words import (
    Schema,
    all_null,
    array,
    boolean,
    either,
    free,
    integer,
    null_or,
    number,
    one_of,
    text,
    thing,
)
from naru_router.core.sampling import MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS

_MODEL = text("One of GET /v1/models.", minLength=1)
_TOOL_NAME = text(pattern="^[a-zA-Z0-9_.-]{1,128}$")


def response_schemas() -> dict[str, Schema]:
    """Components of /v1/responses."""
    tool = thing(
        {
            "type": one_of("function"),
            "name": _TOOL_NAME,
            "description": null_or(text()),
            "parameters": null_or(free("JSON Schema.")),
            "strict": null_or(boolean()),
        },
        ["type", "name"],
    )
    named = thing({"type": one_of("function"), "name": text(minLength=1)}, ["type", "name"])
    part = thing({"type": one_of("input_text"), "text": text()}, ["type", "text"])
    message = thing(
        {"role": one_of("user", "system", "developer"), "content": either(text(), array(part, least=1))},
        ["role", "content"],
    )
    fields = {
        "model": _MODEL,
        "input": either(text(), array(either(message, free("Another item.")), least=1)),
        "instructions": text(),
        "max_output_tokens": integer(1, 2**31 - 1),
        "temperature": number(0, 100),
        "top_p": number(0, 1),
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "tools": array(tool),
        "tool_choice": either(one_of("auto", "none", "required"), named),
        "parallel_tool_calls": boolean(),
        "text": thing({"format": free("text, json_object or json_schema.")}),
        "reasoning": thing({"effort": null_or(text()), "summary": null_or(one_of("auto", "concise", "detailed"))}),
        "stream": boolean(),
        "store": boolean("Keep it, so that `previous_response_id` can name it. false where absent."),
        "previous_response_id": text(),
        "metadata": {"type": "object", "additionalProperties": text(maxLength=512), "maxProperties": 16},
        "user": text(),
    }
    response = thing(
        {
            "id": text(),
            "object": one_of("response"),
            "created_at": number(0),
            "status": one_of("completed", "incomplete", "failed", "in_progress"),
            "model": text(),
            "output": array(free()),
            "usage": null_or(free()),
        },
        ["id", "object", "created_at", "status", "model", "output"],
    )
    return {
        "ResponseRequest": thing(all_null(fields, but=("model",)), ["model", "input"]),
        "Response": response,
        "Items": thing({"object": one_of("list"), "data": array(free())}, ["object", "data"]),
    }


def message_schemas() -> dict[str, Schema]:
    """Components of /v1/messages."""
    block = either(
        thing({"type": one_of("text"), "text": text(minLength=1)}, ["type", "text"]), free("Another content block.")
    )
    message = thing(
        {"role": one_of("user", "assistant"), "content": either(text(minLength=1), array(block, least=1))},
        ["role", "content"],
    )
    tool = thing(
        {"name": _TOOL_NAME, "description": null_or(text()), "input_schema": free("JSON Schema.")},
        ["name", "input_schema"],
    )
    choice = thing(
        {
            "type": one_of("auto", "any", "tool", "none"),
            "name": text(),
            "disable_parallel_tool_use": null_or(boolean()),
        },
        ["type"],
    )
    counted = {
        "model": _MODEL,
        "messages": array(message, least=1),
        "system": either(text(), array(thing({"type": one_of("text"), "text": text()}, ["type", "text"]))),
        "tools": array(tool),
        "tool_choice": choice,
    }
    fields = {
        **counted,
        "max_tokens": integer(1, 2**31 - 1),
        "temperature": number(0, 100),
        "top_p": number(0, 1),
        "top_k": integer(-1, 2**31 - 1),
        "stop_sequences": array(text(minLength=1, maxLength=MAX_STOP_CHARS), most=MAX_STOP_STRINGS),
        "stream": boolean(),
        "metadata": thing({"user_id": null_or(text())}),
    }
    reply = thing(
        {
            "id": text(),
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": text(),
            "content": array(free()),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": null_or(text()),
            "usage": free(),
        },
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    )
    error = thing({"type": text(), "message": text()}, ["type", "message"])
    return {
        "MessagesRequest": thing(
            all_null(fields, but=("model", "messages", "max_tokens")), ["model", "messages", "max_tokens"]
        ),
        "CountRequest": thing(all_null(counted, but=("model", "messages")), ["model", "messages"]),
        "AssistantMessage": reply,
        "Count": thing({"input_tokens": integer(0)}, ["input_tokens"]),
        "AnthropicError": thing({"type": one_of("error"), "error": error}, ["type", "error"]),
    }


def error_schemas() -> dict[str, Schema]:
    """OpenAI's error, and the one of the Open Inference Protocol."""
    error = thing(
        {"message": text(), "type": text(), "param": null_or(text()), "code": null_or(text())},
        ["message", "type", "param", "code"],
    )
    return {
        "Error": thing({"error": error}, ["error"]),
        "OipError": thing({"error": text()}, ["error"]),
        "Anything": free(),
    }
