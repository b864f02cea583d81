"""POST /v1/chat/completions. Pure."""

from __future__ import annotations

from naru_router.core.chat_request import ROLES
from naru_router.core.openapi.sampling import sampling_fields, stream_fields
from naru_router.core.openapi.structure import guided_fields, response_format
from naru_router.core.openapi.words import (
    Schema,
    all_null,
    array,
    boolean,
    either,
    free,
    integer,
    null_or,
    one_of,
    ref,
    text,
    thing,
)
from naru_router.core.sampling import MAX_LOGPROBS

_NAME = text(pattern="^[a-zA-Z0-9_.-]{1,128}$")


def chat_schemas() -> dict[str, Schema]:
    """Components of chats."""
    part = thing({"type": one_of("text"), "text": text()}, ["type", "text"])
    call = thing(
        {
            "id": text(),
            "type": one_of("function"),
            "function": thing({"name": text(), "arguments": text("JSON.")}, ["name", "arguments"]),
        },
        ["id", "function"],
    )
    message = thing(
        {
            "role": one_of(*ROLES),
            "content": null_or(either(text(), array(part, least=1))),
            "name": null_or(text()),
            "tool_calls": null_or(array(ref("ToolCall"))),
            "tool_call_id": null_or(text("Of a `tool` message: the call that it answers.")),
            "reasoning_content": null_or(text("What an assistant's message had thought.")),
        },
        ["role"],
    )
    function = thing(
        {
            "name": _NAME,
            "description": null_or(text()),
            "parameters": null_or(free("JSON Schema of the arguments.")),
            "strict": null_or(boolean("The arguments fit the schema.")),
        },
        ["name"],
    )
    named = thing({"type": one_of("function"), "function": thing({"name": text()}, ["name"])}, ["type", "function"])
    return {
        "Message": message,
        "ToolCall": call,
        "Tool": thing({"type": one_of("function"), "function": function}, ["type", "function"]),
        "ToolChoice": either(one_of("auto", "none", "required"), named),
        "ChatRequest": thing(all_null(_chat_fields(), but=("model", "messages")), ["model", "messages"]),
        "ChatCompletion": _completion("chat.completion", _choice()),
        "Usage": _usage(),
    }


def _chat_fields() -> dict[str, Schema]:
    return {
        "model": text("One of GET /v1/models.", minLength=1),
        "messages": array(ref("Message"), least=1),
        **sampling_fields(),
        **stream_fields(),
        "max_completion_tokens": integer(0, 2**31 - 1, "The same as `max_tokens`."),
        "logprobs": boolean(),
        "top_logprobs": integer(0, MAX_LOGPROBS, "Only with `logprobs`."),
        "tools": array(ref("Tool")),
        "tool_choice": ref("ToolChoice"),
        "parallel_tool_calls": boolean("false: one call at most."),
        "response_format": response_format(),
        **guided_fields(),
    }


def _choice() -> Schema:
    message = thing(
        {
            "role": one_of("assistant"),
            "content": null_or(text()),
            "refusal": {"type": "null"},
            "tool_calls": array(ref("ToolCall")),
            "reasoning_content": text(),
        },
        ["role", "content"],
    )
    return thing(
        {
            "index": integer(0),
            "message": message,
            "logprobs": null_or(free()),
            "finish_reason": one_of("stop", "length", "tool_calls"),
        },
        ["index", "message", "finish_reason"],
    )


def _completion(kind: str, choice: Schema) -> Schema:
    fields = {
        "id": text(),
        "object": one_of(kind),
        "created": integer(0),
        "model": text(),
        "choices": array(choice),
        "usage": ref("Usage"),
    }
    return thing(fields, list(fields))


def _usage() -> Schema:
    return thing(
        {
            "prompt_tokens": integer(0),
            "completion_tokens": integer(0),
            "total_tokens": integer(0),
            "prompt_tokens_details": thing({"cached_tokens": integer(0)}),
        },
        ["prompt_tokens", "total_tokens"],
    )


def completion_schemas() -> dict[str, Schema]:
    """Components of POST /v1/completions."""
    ids = array(integer(0, 2**31 - 1), least=1)
    prompt = either(text(), ids, array(text(), least=1), array(ids, least=1), about="Texts or token ids.")
    fields = {
        "model": text("One of GET /v1/models.", minLength=1),
        "prompt": prompt,
        **sampling_fields(),
        **stream_fields(),
        "logprobs": integer(0, MAX_LOGPROBS),
        "echo": boolean("The answer begins with the prompt."),
        "best_of": integer(1, 128, "Choices made, of which the best `n` are given."),
        "response_format": response_format(),
        **guided_fields(),
    }
    choice = thing(
        {
            "index": integer(0),
            "text": text(),
            "logprobs": null_or(free()),
            "finish_reason": one_of("stop", "length"),
        },
        ["index", "text", "finish_reason"],
    )
    return {
        "CompletionRequest": thing(all_null(fields, but=("model", "prompt")), ["model", "prompt"]),
        "Completion": _completion("text_completion", choice),
    }
