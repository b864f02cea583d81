"""Features of OpenAI's and vLLM's APIs that are not built: refused by name, never silently ignored.

Called by both request parsers. A value that asks for nothing (``store: false``, ``suffix: ""``) passes.
"""

from __future__ import annotations

from collections.abc import Callable

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import Fields, check_text, refuse, shown

MAX_METADATA = 16
_COMMON: dict[str, Callable[[object], bool]] = {
    "store": lambda v: v is False,
    "service_tier": lambda v: v in ("auto", "default"),
    "early_stopping": lambda v: v is False,
    "add_special_tokens": lambda v: False,
    "skip_special_tokens": lambda v: v is True,
    "include_stop_str_in_output": lambda v: v is False,
    "truncate_prompt_tokens": lambda v: False,
    "allowed_token_ids": lambda v: v == [],
    "bad_words": lambda v: v == [],
    "logits_processors": lambda v: v == [],
    "return_token_ids": lambda v: v is False,
    "return_tokens_as_token_ids": lambda v: v is False,
}
_CHAT = _COMMON | {
    "modalities": lambda v: v == ["text"],
    "audio": lambda v: False,
    "prediction": lambda v: False,
    "verbosity": lambda v: v == "medium",
    "web_search_options": lambda v: False,
    "chat_template": lambda v: False,
    "echo": lambda v: v is False,
}
# As some clients send them with every request; without chats there is nothing to call.
_COMPLETION = _COMMON | {
    "suffix": lambda v: v == "",
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
}


def refuse_unsupported_chat(fields: Fields) -> None:
    """Checks the fields of a chat body.

    Raises:
        InvalidRequest: a feature that is not built is asked for.
    """
    _refuse(fields, _CHAT)


def refuse_unsupported_completion(fields: Fields) -> None:
    """Checks the fields of a completion body.

    Raises:
        InvalidRequest: a feature that is not built is asked for.
    """
    _refuse(fields, _COMPLETION)


def _refuse(fields: Fields, allowed: dict[str, Callable[[object], bool]]) -> None:
    for name, value in fields.items():
        is_harmless = allowed.get(name)
        if is_harmless is None:
            continue
        if value is not None and not is_harmless(value):
            message = f"{name} is {shown(value)}; this server does not support it: leave it out"
            raise InvalidRequest(message, param=name)


def _text_of(name: str) -> Callable[[object], bool]:
    return lambda value: bool(check_text(name, value)) or True


def _check_metadata(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        refuse("metadata", value, f"an object of at most {MAX_METADATA} texts")
    for key, text in value.items():
        check_text("metadata", key)
        check_text("metadata", text)
    return True


# These name the caller or what belongs together; they change no answer.
_NO_EFFECT: dict[str, Callable[[object], bool]] = {
    **{name: _text_of(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
    "metadata": _check_metadata,
}
_CHAT |= _NO_EFFECT
_COMPLETION |= _NO_EFFECT
