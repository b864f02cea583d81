"""The bodies of tokenize and detokenize calls, checked. Built by the HTTP edge."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import ChatCall, parse_chat, read_model
from naru_router.core.fields import Fields, check_integer, refuse
from naru_router.core.sampling import INT32_MAX

_CHAT_FIELDS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "model")
"""Those that say how a chat is rendered; others mean nothing here."""


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A text, or a chat that becomes one."""

    model: str
    prompt: str
    chat: ChatCall | None
    add_special_tokens: bool
    wants_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    """Token ids."""

    model: str
    tokens: tuple[int, ...]


def parse_tokenize(body: dict[str, object]) -> TokenizeCall:
    """Reads a tokenize body. A rendered chat has its special tokens already: none are added unless asked for.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    prompt, has_messages = fields.text("prompt"), fields.get("messages") is not None
    if (prompt is not None) == has_messages:
        what = "both prompt and messages are there" if has_messages else "neither prompt nor messages is there"
        raise InvalidRequest(f"{what}; send one of them", param="prompt")
    specials = fields.boolean("add_special_tokens")
    wants_texts = fields.boolean("return_token_strs") or False
    chat = None
    if has_messages:
        chat = parse_chat({name: body[name] for name in _CHAT_FIELDS if name in body})
    return TokenizeCall(model, prompt or "", chat, not has_messages if specials is None else specials, wants_texts)


def parse_detokenize(body: dict[str, object]) -> DetokenizeCall:
    """Reads a detokenize body.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    values = fields.get("tokens")
    if not isinstance(values, list):
        refuse("tokens", values, "an array of token ids")
    return DetokenizeCall(model, tuple(check_integer(f"tokens[{i}]", it, 0, INT32_MAX) for i, it in enumerate(values)))
