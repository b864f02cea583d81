"""The tools of a Responses body, which of them may or must be called, and the form of its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.checked_json import check_object
from naru_router.core.fields import Fields, refuse
from naru_router.core.structured import read_named_schema
from naru_router.core.tools.declared import AUTO, Tool, ToolChoice, check_choice, check_name, check_tools, read_function

Object = dict[str, object]
_FORMATS = ("text", "json_object", "json_schema")
_MODES: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The tools, all of them functions of the client.

    Raises:
        InvalidRequest: naming the field, or the type of a tool that the server would have to run.
    """
    tools = []
    for index, value in enumerate(fields.array("tools") or []):
        path = f"tools[{index}]"
        if not isinstance(value, dict):
            refuse(path, value, "an object with type and name")
        tool = Fields(value, f"{path}.")
        if tool.get("type") != "function":
            refuse(tool.path("type"), tool.get("type"), "function: tools that the server runs are not supported")
        if tool.get("parameters") is not None:
            check_object(tool.path("parameters"), tool.get("parameters"))
        tools.append(read_function(tool))
    return check_tools(tools)


def shown_tool(tool: Tool) -> Object:
    """A tool as the response tells it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.is_strict,
    }


def read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice, object]:
    """The tools that are offered, whether they are called, and the choice as the response tells it.

    Raises:
        InvalidRequest: naming the field.
    """
    value = fields.get("tool_choice")
    if value is None:
        return tuple(tools), AUTO, "auto"
    if isinstance(value, str):
        if value not in _MODES:
            refuse("tool_choice", value, "auto, none, required or an object")
        return tuple(tools), check_choice(ToolChoice(_MODES[value]), tools), value
    choice = fields.object("tool_choice")
    assert choice is not None  # it is there
    kind = choice.get("type")
    if kind == "function":
        name = check_name("tool_choice.name", choice.get("name"))
        named = check_choice(ToolChoice("named", name), tools, "tool_choice.name")
        return tuple(tools), named, {"type": "function", "name": name}
    if kind != "allowed_tools":
        refuse("tool_choice.type", kind, "function or allowed_tools: tools that the server runs are not supported")
    return _read_allowed(choice, tools)


def _read_allowed(choice: Fields, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], ToolChoice, object]:
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        refuse("tool_choice.mode", mode, "auto or required")
    names = []
    for index, value in enumerate(choice.array("tools") or []):
        path = f"tool_choice.tools[{index}]"
        if not isinstance(value, dict) or value.get("type") != "function":
            refuse(path, value, "an object of type function with a name")
        names.append(check_name(f"{path}.name", value.get("name")))
        check_choice(ToolChoice("named", names[-1]), tools, f"{path}.name")
    allowed = tuple([tool for tool in tools if tool.name in names])
    told = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    return allowed, check_choice(ToolChoice(_MODES[str(mode)]), allowed, "tool_choice.tools"), told


def read_text(fields: Fields, sampling: SamplingParams) -> Object:
    """The form of the text, put into the sampling; as the response tells it.

    Raises:
        InvalidRequest: naming the field.
    """
    text = fields.object("text")
    if text is None:
        return {"format": {"type": "text"}, "verbosity": "medium"}
    verbosity = text.get("verbosity")
    if verbosity not in (None, "medium"):
        refuse("text.verbosity", verbosity, "medium: how long an answer is, the model decides")
    form = text.object("format")
    told: Object = {"type": "text"} if form is None else _read_format(form, sampling)
    return {"format": told, "verbosity": "medium"}


def _read_format(form: Fields, sampling: SamplingParams) -> Object:
    kind = form.get("type")
    if kind not in _FORMATS:
        refuse("text.format.type", kind, f"one of {', '.join(_FORMATS)}")
    if kind == "json_object":
        sampling.structured.json_object = True
        sampling.structured.param = "text.format"
    if kind != "json_schema":
        return {"type": kind}
    sampling.structured.CopyFrom(read_named_schema(form, "text.format.schema"))
    schema = check_object("text.format.schema", form.get("schema"))
    told: Object = {"type": kind, "name": form.get("name"), "schema": schema, "strict": form.get("strict") is not False}
    description = form.text("description")
    return {**told, "description": description} if description is not None else told
