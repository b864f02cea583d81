"""The body of POST /v1/messages, checked, as a chat. Unknown fields are ignored; what would change the answer is not.

Rendering and running the chat are not done here.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.anthropic.content import read_conversation
from naru_router.core.anthropic.tools import read_tool_choice, read_tools
from naru_router.core.chat_request import ChatCall, ChatMessage, read_model
from naru_router.core.fields import Fields, check_text, refuse, shown
from naru_router.core.sampling import INT32_MAX, MAX_STOP_CHARS, MAX_STOP_STRINGS
from naru_router.core.sampling_fields import read_common_sampling
from naru_router.core.structured import schema_output
from naru_router.core.template_options import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE

MIN_BUDGET_TOKENS = 1024
_THINKING = ("enabled", "disabled", "adaptive")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_NOT_BUILT = ("container", "mcp_servers", "context_management")
_TIERS = ("auto", "standard_only")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is to be done with what the model thinks."""

    is_shown: bool = False
    """There are thinking blocks."""
    is_emptied: bool = False
    """Their text is left out."""


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """What a client of the Messages API asked for."""

    chat: ChatCall
    thinking: Thinking


def parse_messages(body: dict[str, object]) -> MessagesCall:
    """Reads a body of POST /v1/messages.

    Raises:
        InvalidRequest: naming the field.
    """
    max_tokens = Fields(body).integer("max_tokens", 1, INT32_MAX)
    if max_tokens is None:
        raise InvalidRequest("max_tokens is missing; say how many tokens the answer may have", param="max_tokens")
    return _parse(body, max_tokens)


def parse_count(body: dict[str, object]) -> MessagesCall:
    """Reads a body of POST /v1/messages/count_tokens: the same without lengths and stops.

    Raises:
        InvalidRequest: naming the field.
    """
    return _parse(body, None)


def _parse(body: dict[str, object], max_tokens: int | None) -> MessagesCall:
    fields = Fields(body)
    model = read_model(fields)
    _refuse_unbuilt(fields)
    messages = read_conversation(fields)
    sampling = read_common_sampling(body, max_tokens)
    sampling.stop.extend(_read_stops(fields))
    tools = read_tools(fields)
    choice, is_parallel = read_tool_choice(fields, tools)
    thinking, options = _read_thinking(fields, max_tokens)
    options |= _read_beginning(messages[-1])
    _read_output_config(fields, sampling, options)
    chat = ChatCall(
        model,
        messages,
        sampling,
        stream=max_tokens is not None and (fields.boolean("stream") or False),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        template_options=options,
        includes_reasoning=thinking.is_shown,
    )
    return MessagesCall(chat, thinking)


def _refuse_unbuilt(fields: Fields) -> None:
    for name in _NOT_BUILT:
        value = fields.get(name)
        if value not in (None, [], {}):
            raise InvalidRequest(f"{name} is {shown(value)}; this server does not support it: leave it out", param=name)
    tier = fields.get("service_tier")
    if tier is not None and tier not in _TIERS:
        refuse("service_tier", tier, f"one of {', '.join(_TIERS)}")
    metadata = fields.object("metadata")
    if metadata is not None:
        metadata.text("user_id")


def _read_stops(fields: Fields) -> list[str]:
    values = fields.array("stop_sequences") or []
    if len(values) > MAX_STOP_STRINGS:
        refuse("stop_sequences", values, f"an array of at most {MAX_STOP_STRINGS} strings")
    stops = []
    for index, value in enumerate(values):
        path = f"stop_sequences[{index}]"
        text = check_text(path, value)
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            refuse(path, text, f"a string of 1 to {MAX_STOP_CHARS} characters")
        stops.append(text)
    return stops


def _read_thinking(fields: Fields, max_tokens: int | None) -> tuple[Thinking, dict[str, object]]:
    thinking = fields.object("thinking")
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in _THINKING:
        refuse("thinking.type", kind, f"one of {', '.join(_THINKING)}")
    if thinking is None or kind == "disabled":
        return Thinking(), {"enable_thinking": False}
    if kind == "enabled":
        _check_budget(thinking, max_tokens)
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted"):
        refuse("thinking.display", display, "summarized or omitted")
    return Thinking(is_shown=True, is_emptied=display == "omitted"), {"enable_thinking": True}


def _read_beginning(last: ChatMessage) -> dict[str, object]:
    """An answer that the client has begun goes on where it ends."""
    if last.role != "assistant":
        return {}
    if last.tool_calls or not last.content:
        message = "the last of messages is the assistant's and has no text to go on from; send the results of its tools"
        raise InvalidRequest(message, param="messages")
    return {CONTINUE_FINAL_MESSAGE: True, ADD_GENERATION_PROMPT: False}


def _check_budget(thinking: Fields, max_tokens: int | None) -> None:
    path = thinking.path("budget_tokens")
    budget = thinking.integer("budget_tokens", MIN_BUDGET_TOKENS, INT32_MAX)
    if budget is None:
        refuse(path, None, f"an integer of at least {MIN_BUDGET_TOKENS}")
    if max_tokens is not None and budget >= max_tokens:
        raise InvalidRequest(f"{path} is {budget}, not below max_tokens {max_tokens}; lower it", param=path)


def _read_output_config(fields: Fields, sampling: SamplingParams, options: dict[str, object]) -> None:
    config = fields.object("output_config")
    if config is not None:
        effort = config.get("effort")
        if effort is not None:
            if effort not in _EFFORTS:
                refuse("output_config.effort", effort, f"one of {', '.join(_EFFORTS)}")
            options["reasoning_effort"] = effort
    wanted = fields.object("output_format")
    if config is not None and config.get("format") is not None:
        wanted = config.object("format")
    if wanted is None:
        return
    if wanted.get("type") != "json_schema":
        refuse(wanted.path("type"), wanted.get("type"), "json_schema")
    path = wanted.path("schema")
    sampling.structured.CopyFrom(schema_output(wanted.get("schema"), path, path))
