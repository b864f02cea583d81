"""The body of POST /v1/chat/completions, checked. Built by the HTTP edge, read by the request's life.

Rendering the chat template is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.fields import Fields, check_text, refuse
from naru_router.core.sampling import MAX_LOGPROBS, read_sampling
from naru_router.core.unsupported import refuse_unsupported_chat

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; parts of text are joined into one string."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """What a chat client asked for."""

    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    """Never changed after it is built."""
    stream: bool = False
    include_usage: bool = False


def parse_chat(body: dict[str, object]) -> ChatCall:
    """Reads a chat body. Unknown fields are ignored.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    refuse_unsupported_chat(fields)
    messages = read_messages(fields.get("messages"))
    sampling = read_sampling(fields)
    _apply_max_tokens(fields, sampling)
    _apply_logprobs(fields, sampling)
    stream, include_usage = read_stream(fields)
    return ChatCall(model, messages, sampling, stream, include_usage)


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
    stream = fields.boolean("stream") or False
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise InvalidRequest(
            "stream_options is set but stream is not true; set stream or leave it out", param="stream_options"
        )
    if options.boolean("include_obfuscation"):
        refuse("stream_options.include_obfuscation", True, "false: obfuscation is not supported")
    return stream, options.boolean("include_usage") or False


def read_messages(values: object) -> tuple[ChatMessage, ...]:
    """The messages of a chat, as JSON gives them.

    Raises:
        InvalidRequest: none, or one that is not understood.
    """
    if not isinstance(values, list) or not values:
        refuse("messages", values, "an array of at least one message")
    return tuple([_read_plainly(value) or _read_message(i, value) for i, value in enumerate(values)])


def _read_plainly(value: object) -> ChatMessage | None:
    """A message of a role and a text, as nearly all are; None: it takes a closer look."""
    if type(value) is not dict or len(value) != 2:
        return None
    role, content = value.get("role"), value.get("content")
    if isinstance(content, str) and content.isascii() and isinstance(role, str) and role in ROLES:
        return ChatMessage(role, content)
    return None


def _read_message(index: int, value: object) -> ChatMessage:
    path = f"messages[{index}]"
    if not isinstance(value, dict):
        refuse(path, value, "an object with role and content")
    fields = Fields(value, f"{path}.")
    role = fields.get("role")
    if role not in ROLES:
        refuse(fields.path("role"), role, f"one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.get(name) not in (None, []):
            refuse(fields.path(name), fields.get(name), "absent: it is not supported")
    content = _read_content(fields.path("content"), fields.get("content"))
    return ChatMessage(str(role), content, fields.text("name"), fields.text("tool_call_id"))


def _read_content(path: str, value: object) -> str:
    if isinstance(value, str):
        return check_text(path, value)
    if not isinstance(value, list) or not value:
        refuse(path, value, "a string or an array of text parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            refuse(f"{path}[{i}].type", kind, "text: other parts are not supported by this model")
        texts.append(check_text(f"{path}[{i}].text", part.get("text")))
    return "".join(texts)


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
