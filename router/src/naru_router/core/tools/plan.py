"""What a chat needs beyond its messages: values for the template, a grammar, a reader for what the model writes.

Asked by the job maker, once before the template is rendered and once after. Plain chats of plain models need nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import StructuredOutput
from naru_router.core.chat_parts import OutputReader
from naru_router.core.chat_request import ChatCall, ChatMessage, Tool
from naru_router.core.template_options import CONTINUE_FINAL_MESSAGE
from naru_router.core.tools.channels import FINAL, ChannelReader
from naru_router.core.tools.grammar import (
    Thinking,
    answer_grammar,
    calls_grammar,
    calls_or_answer_grammar,
    channel_grammar,
    channel_opening,
    forced_opening,
    free_calls_grammar,
)
from naru_router.core.tools.prompting import told_in_text, tool_values, with_short_ids
from naru_router.core.tools.reader import StyledReader
from naru_router.core.tools.styles import Style


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What the template is given."""

    messages: tuple[ChatMessage, ...]
    values: Mapping[str, object] | None = None
    """By name, beside the messages; None: nothing but what all chats have."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What is asked of the model, and how its answer is read."""

    tail: str = ""
    """Follows the rendered prompt."""
    structured: StructuredOutput | None = None
    """In place of the call's own; None: that one stays."""
    shows_special_tokens: bool = False
    make_reader: Callable[[Callable[[], str]], OutputReader] | None = None
    """Makes a reader, given what makes ids of calls; None: all of the answer is text."""


PLAIN_OUTPUT = OutputPlan()


def usable_tools(call: ChatCall) -> tuple[Tool, ...]:
    """The tools that may be called."""
    choice = call.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "named":
        return tuple(tool for tool in call.tools if tool.name == choice.name)
    return call.tools


def is_parallel(call: ChatCall) -> bool:
    """Whether one answer may have several calls."""
    return call.parallel_tool_calls and call.tool_choice.mode != "named"


def plan_prompt(style: Style, call: ChatCall, template: str) -> PromptPlan:
    """What the template is given for a chat. Where no tool may be called, it sees none."""
    has_calls = any([message.role == "tool" or bool(message.tool_calls) for message in call.messages])
    tools = call.tools if call.tool_choice.mode != "none" else ()
    if not tools and not has_calls:
        return PromptPlan(call.messages, call.template_options or None)
    if style.is_told_by_us:
        messages = told_in_text(
            call.messages, tools, call.tool_choice, is_parallel=is_parallel(call), template=template
        )
        return PromptPlan(messages, call.template_options or None)
    messages = with_short_ids(call.messages) if style.has_short_ids else call.messages
    values = dict(call.template_options)
    if tools:
        values["tools"] = tool_values(tools)
    return PromptPlan(messages, values)


def plan_output(style: Style, call: ChatCall, prompt: str) -> OutputPlan:
    """What is asked of the model after a rendered prompt.

    Raises:
        InvalidRequest: what is asked for cannot be kept together.
    """
    tools = usable_tools(call)
    if style.name == "channels":
        return _plan_channels(call, tools)
    if not tools and style.reasoning is None:
        return PLAIN_OUTPUT
    thinking = _thinking(style, call, prompt)
    own = call.sampling.structured if call.sampling.HasField("structured") else None
    if not tools:
        if thinking == "never":
            return PLAIN_OUTPUT
        bound = _in_grammar(style, thinking)
        structured = None if own is None else _lark(answer_grammar(style, own, thinking=bound), own.param)
        return OutputPlan(
            structured=structured,
            shows_special_tokens=style.are_marks_special,
            make_reader=_reader_maker(style, call, (), thinking, ""),
        )
    tail = ""
    if call.tool_choice.mode in ("required", "named"):
        tail = forced_opening(style, tools)
        bound = "never" if tail else _in_grammar(style, thinking)
        grammar = calls_grammar(style, tools, is_parallel=is_parallel(call), thinking=bound)
        structured = _lark(grammar, "tools")
        if tail and thinking == "open":
            assert style.reasoning is not None
            tail = style.reasoning[1] + tail
    else:
        structured = _structured_of_auto(style, call, tools, own, _in_grammar(style, thinking))
    return OutputPlan(
        tail,
        structured,
        style.are_marks_special,
        _reader_maker(style, call, tools, thinking, tail),
    )


def _plan_channels(call: ChatCall, tools: tuple[Tool, ...]) -> OutputPlan:
    """Where the model is held to a form the prompt opens the channel for it, as it does not think first then."""
    own = call.sampling.structured if call.sampling.HasField("structured") else None
    tail, structured = "", None
    if tools and call.tool_choice.mode in ("required", "named"):
        tail, grammar = channel_opening(tools), channel_grammar(tools)
        structured = _lark(grammar, "tools")
    elif tools and own is not None:
        message = f"{own.param} cannot be kept beside tools with this model; set tool_choice to none or required"
        raise InvalidRequest(message, param=own.param)
    elif own is not None:
        tail = FINAL

    def make(new_id: Callable[[], str]) -> OutputReader:
        return ChannelReader(
            new_id,
            takes_calls=bool(tools),
            max_calls=0 if is_parallel(call) else 1,
            primer=tail,
            shows_reasoning=call.includes_reasoning,
        )

    return OutputPlan(tail, structured, shows_special_tokens=True, make_reader=make)


def _structured_of_auto(
    style: Style, call: ChatCall, tools: tuple[Tool, ...], own: StructuredOutput | None, thinking: Thinking
) -> StructuredOutput | None:
    """Where calls may be made or not: all of them strict, or an answer of some form, or no bound at all."""
    if own is not None:
        grammar = calls_or_answer_grammar(style, tools, own, is_parallel=is_parallel(call), thinking=thinking)
        if grammar is None:
            raise InvalidRequest(
                f"{own.param} cannot be kept beside tools with this model; set tool_choice to none or required",
                param=own.param,
            )
        return _lark(grammar, own.param)
    if all(tool.is_strict for tool in tools):
        grammar = free_calls_grammar(style, tools, is_parallel=is_parallel(call), thinking=thinking)
        return None if grammar is None else _lark(grammar, "tools")
    return None


def _lark(grammar: str, param: str) -> StructuredOutput:
    return StructuredOutput(grammar=grammar, param=param)


def _thinking(style: Style, call: ChatCall, prompt: str) -> Thinking:
    """Whether the model may think after this prompt."""
    if style.reasoning is None:
        return "never"
    begin, end = style.reasoning
    if call.template_options.get(CONTINUE_FINAL_MESSAGE):
        content = call.messages[-1].content
        return "open" if content.rfind(begin) > content.rfind(end) else "never"
    last = prompt.rstrip()
    if last.endswith(begin):
        return "open"
    return "never" if last.endswith(end) else "maybe"


def _in_grammar(style: Style, thinking: Thinking) -> Thinking:
    """Marks that are special tokens cannot be told in a grammar: under one such a model answers at once."""
    is_special = style.reasoning is not None and style.reasoning[0].startswith("[")
    return "never" if is_special else thinking


def _reader_maker(
    style: Style, call: ChatCall, tools: tuple[Tool, ...], thinking: Thinking, tail: str
) -> Callable[[Callable[[], str]], OutputReader]:
    by_name = {tool.name: tool for tool in tools} if tools else None
    max_calls = 0 if is_parallel(call) else 1
    primer = tail
    if thinking == "open" and style.reasoning is not None:
        primer = style.reasoning[0] + tail
    read_style = style if thinking != "never" else replace(style, reasoning=None)
    if call.tool_choice.mode == "auto" and call.sampling.HasField("structured"):
        read_style = replace(read_style, takes_bare_json=False)  # the answer may be JSON; calls have their marks
    shows_reasoning = call.includes_reasoning

    def make(new_id: Callable[[], str]) -> OutputReader:
        return StyledReader(
            read_style,
            new_id,
            tools=by_name,
            max_calls=max_calls,
            primer=primer,
            shows_reasoning=shows_reasoning,
        )

    return make
