"""The body of POST /v1/chat/completions, checked. Built by the HTTP edge, read by the request's life.

Rendering the chat template is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.chat_messages import ROLES, ChatMessage, check_conversation, read_messages
from naru_router.core.fields import Fields, refuse
from naru_router.core.sampling import MAX_LOGPROBS, read_sampling
from naru_router.core.search import read_search
from naru_router.core.structured import read_structured
from naru_router.core.template_options import read_template_options
from naru_router.core.tools.declared import (
    AUTO,
    Tool,
    ToolCall,
    ToolChoice,
    check_choice,
    check_name,
    check_tools,
    read_function,
    read_tool_choice,
    read_tools,
)
from naru_router.core.unsupported import refuse_unsupported_chat

__all__ = [
    "ROLES",
    "ChatCall",
    "ChatMessage",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "check_conversation",
    "parse_chat",
    "read_messages",
    "read_model",
    "read_stream",
]

_MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")
_COMMON_FIELDS = frozenset(
    "model messages stream stream_options temperature top_p top_k min_p max_tokens max_completion_tokens min_tokens "
    "stop seed n logprobs top_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias ignore_eos "
    "stop_token_ids user priority".split()
)
"""Bodies that have these alone need no look at tools, formats and options: most of them."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What a chat client asked for."""

    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    """Never changed after it is built."""
    stream: bool = False
    include_usage: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    template_options: Mapping[str, object] = field(default_factory=dict)
    """Further values for the chat template: JSON values by name."""
    best_of: int = 0
    """Choices that are made, of which the best `n` are given; 0: n."""
    includes_reasoning: bool = True
    """False: what the model thought is left out of the answer."""
    wants_function_call: bool = False
    """The answer has the older form, `function_call`, which has room for one call."""


def parse_chat(body: dict[str, object]) -> ChatCall:
    """Reads a chat body. Unknown fields are ignored.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    refuse_unsupported_chat(fields)
    messages = read_messages(fields.get("messages"))
    if any([message.role == "tool" for message in messages]):
        check_conversation(messages)
    sampling = read_sampling(fields)
    _apply_max_tokens(fields, sampling)
    _apply_logprobs(fields, sampling)
    stream, include_usage = read_stream(fields)
    if body.keys() <= _COMMON_FIELDS:
        return ChatCall(model, messages, sampling, stream, include_usage)
    apply_prompt_logprobs(fields, sampling, is_stream=stream)
    structured = read_structured(fields)
    if structured is not None:
        sampling.structured.CopyFrom(structured)
    tools, choice, wants_function_call = _read_all_tools(fields)
    parallel = fields.boolean("parallel_tool_calls")
    includes_reasoning = fields.boolean("include_reasoning")
    return ChatCall(
        model,
        messages,
        sampling,
        stream,
        include_usage,
        tools,
        choice,
        parallel_tool_calls=parallel is not False and not wants_function_call,
        template_options=read_template_options(fields, messages[-1].role),
        best_of=read_search(fields, sampling, is_stream=stream),
        includes_reasoning=includes_reasoning is not False,
        wants_function_call=wants_function_call,
    )


def read_model(fields: Fields) -> str:
    """The name of the model.

    Raises:
        InvalidRequest: absent or empty.
    """
    model = fields.text("model")
    if not model:
        raise InvalidRequest("model is missing; name one of GET /v1/models", param="model")
    return model


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, stream_options.include_usage).

    Raises:
        InvalidRequest: wrong types, or stream_options without stream.
    """
    stream, options = read_stream_options(fields)
    return stream, options is not None and (options.boolean("include_usage") or False)


def read_stream_options(fields: Fields) -> tuple[bool, Fields | None]:
    """`stream`, and the checked object `stream_options`.

    Raises:
        InvalidRequest: wrong types, or stream_options without stream.
    """
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is None:
        return stream, None
    if not stream:
        raise InvalidRequest(
            "stream_options is set but stream is not true; set stream or leave it out", param="stream_options"
        )
    if options.boolean("include_obfuscation"):
        refuse("stream_options.include_obfuscation", True, "false: obfuscation is not supported")
    return stream, options


def apply_prompt_logprobs(fields: Fields, sampling: SamplingParams, *, is_stream: bool) -> None:
    """Sets what is to be told of the prompt's tokens.

    Raises:
        InvalidRequest: a wrong number, or asked of a stream.
    """
    count = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if count is None:
        return
    if is_stream:
        message = "prompt_logprobs is set and stream is true; leave one of them out"
        raise InvalidRequest(message, param="prompt_logprobs")
    sampling.prompt_logprobs = count


def _read_all_tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolChoice, bool]:
    """The tools, which may be called, and whether they came in the older form."""
    values = fields.array("functions")
    call = fields.get("function_call")
    if not values:
        if call not in (None, "none", "auto"):
            refuse("function_call", call, "none or auto where there are no functions")
        tools = read_tools(fields)
        return tools, read_tool_choice(fields, tools), False
    for name in ("tools", "tool_choice"):
        if fields.get(name) not in (None, []):
            raise InvalidRequest(f"functions and {name} are both set; send tools and tool_choice alone", param=name)
    functions = []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            refuse(f"functions[{index}]", value, "an object with a name")
        functions.append(read_function(Fields(value, f"functions[{index}].")))
    tools = check_tools(functions, "functions")
    return tools, _read_function_call(call, tools), True


def _read_function_call(value: object, tools: tuple[Tool, ...]) -> ToolChoice:
    if value is None or value == "auto":
        return AUTO
    if value == "none":
        return ToolChoice("none")
    if not isinstance(value, dict):
        refuse("function_call", value, 'auto, none or {"name": …}')
    name = check_name("function_call.name", value.get("name"))
    return check_choice(ToolChoice("named", name), tools, "function_call")


def _apply_max_tokens(fields: Fields, sampling: SamplingParams) -> None:
    given = {name: fields.integer(name, 0, 2**31 - 1) for name in _MAX_TOKENS_NAMES if fields.get(name) is not None}
    if len(set(given.values())) > 1:
        values = " and ".join(f"{name} is {value}" for name, value in given.items())
        raise InvalidRequest(f"{values}; send one of them", param="max_tokens")
    for value in given.values():
        assert value is not None  # absent ones were left out above
        sampling.max_tokens = value
        if sampling.min_tokens > value:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, above max_tokens {value}; lower it", param="min_tokens"
            )


def _apply_logprobs(fields: Fields, sampling: SamplingParams) -> None:
    wanted = fields.boolean("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        raise InvalidRequest(
            "top_logprobs is set but logprobs is not true; set logprobs or leave it out", param="top_logprobs"
        )
    if wanted:
        sampling.logprobs = top or 0
