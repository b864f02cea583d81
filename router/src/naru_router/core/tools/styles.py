"""How a model writes calls of tools and what it thinks: recognised from its chat template's text.

| style | written as | recognised by |
|---|---|---|
| hermes | ``<tool_call>{"name": …, "arguments": …}</tool_call>`` | ``<tool_call>`` and ``tools`` |
| xml | ``<tool_call><function=NAME><parameter=KEY>…`` | the same and ``<function=`` |
| llama | ``{"name": …, "parameters": …}``, also after ``<|python_tag|>`` | Llama 3's header marks and ``tools`` |
| pythonic | ``[name(key=value), …]`` | Llama 4's header marks, or LFM2's list marks, and ``tools`` |
| mistral | ``[TOOL_CALLS][{"name": …, "arguments": …}]`` | ``[TOOL_CALLS]`` |
| mistral_named | ``[TOOL_CALLS]NAME[ARGS]{…}`` | the same and ``[ARGS]`` |
| listed | ``<|tool_call|>[{"name": …, "arguments": …}]<|/tool_call|>`` | ``<|tool_call|>`` and ``tools`` |
| tagged_list | ``<TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>`` | ``<TOOLCALL>`` and ``tools`` |
| channels | ``<|channel|>commentary to=functions.NAME … <|message|>{…}`` | ``<|channel|>`` and ``<|message|>`` |
| generic | as hermes, and bare JSON; Naru tells the model so in the system message | all other templates |

Pure text matching: a template is never run here.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

NO_MARKS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Style:
    """One way of writing."""

    name: str
    call_marks: tuple[str, ...] = NO_MARKS
    """Text after one of them is a call, or several."""
    call_close: str = ""
    """Ends the calls of one mark; empty: nothing does."""
    is_list: bool = False
    """All calls of an answer stand in one list after one mark; else each has its own, or a separator before it."""
    takes_bare_json: bool = False
    """An answer that begins with an object that names a tool is a call."""
    arguments_key: str = "arguments"
    """As the model is used to write it; both spellings are read."""
    reasoning: tuple[str, str] | None = None
    """Marks around what the model thinks, before its answer."""
    are_marks_special: bool = False
    """They are special tokens: their text is part of the output only where that is asked for."""
    is_told_by_us: bool = False
    """The template knows nothing of tools; the system message has to."""
    has_short_ids: bool = False
    """The template takes ids of nine letters and digits alone."""


_THINK, _BRACKET_THINK = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
GENERIC = Style("generic", ("<tool_call>",), "</tool_call>", takes_bare_json=True, is_told_by_us=True)
_MISTRAL = Style("mistral", ("[TOOL_CALLS]",), is_list=True, are_marks_special=True, has_short_ids=True)
_LISTED = Style("listed", ("<|tool_call|>",), is_list=True, are_marks_special=True)
_PYTHONIC = Style("pythonic", is_list=True, are_marks_special=True)
_KNOWN: tuple[tuple[tuple[str, ...], Style], ...] = (
    (("<|channel|>", "<|message|>"), Style("channels", are_marks_special=True)),
    (("[TOOL_CALLS]", "[ARGS]"), replace(_MISTRAL, name="mistral_named", is_list=False)),
    (("[TOOL_CALLS]",), _MISTRAL),
)
"""What a template has that makes it one of a style; the first that fits."""
_WITH_TOOLS: tuple[tuple[tuple[str, ...], Style], ...] = (
    (("<tool_call>", "<function="), Style("xml", ("<tool_call>",), "</tool_call>")),
    (("<tool_call>", "<arg_key>"), GENERIC),  # neither JSON nor the tags that are read here
    (("<tool_call>",), Style("hermes", ("<tool_call>",), "</tool_call>")),
    (("<|tool_call|>", "<|/tool_call|>"), replace(_LISTED, call_close="<|/tool_call|>")),
    (("<|tool_call|>",), _LISTED),
    (("<TOOLCALL>",), Style("tagged_list", ("<TOOLCALL>",), "</TOOLCALL>", is_list=True)),
    (
        ("<|start_header_id|>", "parameters"),
        Style(
            "llama",
            ("<|python_tag|>",),
            takes_bare_json=True,
            arguments_key="parameters",
            are_marks_special=True,
        ),
    ),
    (("<|header_start|>",), replace(_PYTHONIC, call_marks=("<|python_start|>",), call_close="<|python_end|>")),
    (
        ("<|tool_list_start|>",),
        replace(_PYTHONIC, call_marks=("<|tool_call_start|>",), call_close="<|tool_call_end|>"),
    ),
)
"""The same for templates that take tools."""
_HAS_TOOLS = re.compile(r"\btools\b")


@functools.lru_cache(maxsize=256)
def style_of(template: str) -> Style:
    """The style of models with this template."""
    known = _KNOWN + _WITH_TOOLS if _HAS_TOOLS.search(template) else _KNOWN
    style = next((style for marks, style in known if all(mark in template for mark in marks)), GENERIC)
    return replace(style, reasoning=_reasoning_of(template))


def _reasoning_of(template: str) -> tuple[str, str] | None:
    for marks in (_THINK, _BRACKET_THINK):
        if any(mark in template for mark in marks):
            return marks
    return None
