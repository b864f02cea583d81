"""OpenAI features that are not built: refused by name, never silently ignored. Called by both request parsers.

A value that asks for nothing (``tools: []``, ``response_format: {"type": "text"}``) passes.
"""

from __future__ import annotations

from collections.abc import Callable

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import Fields, check_text, shown

_COMMON: dict[str, Callable[[object], bool]] = {
    "response_format": lambda v: isinstance(v, dict) and v.get("type") == "text",
    "store": lambda v: v is False,
    "service_tier": lambda v: v in ("auto", "default"),
    "prompt_logprobs": lambda v: False,
    "guided_json": lambda v: False,
    "guided_regex": lambda v: False,
    "guided_choice": lambda v: False,
    "guided_grammar": lambda v: False,
    "structured_outputs": lambda v: False,
    "use_beam_search": lambda v: v is False,
}
_CHAT = _COMMON | {
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "parallel_tool_calls": lambda v: isinstance(v, bool),  # without tools no call is made, in parallel or not
    "modalities": lambda v: v == ["text"],
    "audio": lambda v: False,
    "prediction": lambda v: False,
    "reasoning_effort": lambda v: v == "none",
    "verbosity": lambda v: False,
    "web_search_options": lambda v: False,
}
_COMPLETION = _COMMON | {"suffix": lambda v: v == ""}
_NO_EFFECT = ("user", "safety_identifier", "prompt_cache_key")
"""Texts that name the caller; they change no answer."""


def refuse_unsupported_chat(fields: Fields) -> None:
    """Checks the fields of a chat body.

    Raises:
        InvalidRequest: a feature that is not built is asked for.
    """
    _refuse(fields, _CHAT)


def refuse_unsupported_completion(fields: Fields) -> None:
    """Checks the fields of a completion body; `best_of` may only equal `n`.

    Raises:
        InvalidRequest: a feature that is not built is asked for.
    """
    _refuse(fields, _COMPLETION)
    best_of, n = fields.get("best_of"), fields.get("n")
    if best_of is not None and (isinstance(best_of, bool) or best_of != (1 if n is None else n)):
        message = f"best_of is {shown(best_of)}; only best_of equal to n is supported: leave it out"
        raise InvalidRequest(message, param="best_of")


def _refuse(fields: Fields, allowed: dict[str, Callable[[object], bool]]) -> None:
    for name, value in fields.items():
        if value is None:
            continue
        is_harmless = allowed.get(name)
        if is_harmless is not None and not is_harmless(value):
            message = f"{name} is {shown(value)}; this server does not support it: leave it out"
            raise InvalidRequest(message, param=name)
        if name in _NO_EFFECT:
            check_text(name, value)
