"""The tools of a Messages body, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Sequence

from naru_router.core.checked_json import check_object
from naru_router.core.fields import Fields, refuse
from naru_router.core.tools.declared import AUTO, Tool, ToolChoice, check_choice, check_name, check_tools

_CHOICES = ("auto", "any", "tool", "none")


def read_tools(fields: Fields) -> tuple[Tool, ...]:
    """The tools, all of them the client's own.

    Raises:
        InvalidRequest: naming the field.
    """
    tools = []
    for index, value in enumerate(fields.array("tools") or []):
        path = f"tools[{index}]"
        if not isinstance(value, dict):
            refuse(path, value, "an object with name and input_schema")
        tools.append(_read_tool(Fields(value, f"{path}.")))
    return check_tools(tools)


def _read_tool(fields: Fields) -> Tool:
    kind = fields.get("type")
    if kind not in (None, "custom"):
        refuse(fields.path("type"), kind, "custom or absent: tools that the server runs are not supported")
    name = check_name(fields.path("name"), fields.get("name"))
    path = fields.path("input_schema")
    schema = check_object(path, fields.get("input_schema"))
    if schema.get("type") != "object":
        refuse(f"{path}.type", schema.get("type"), "object")
    return Tool(name, fields.text("description") or "", schema, is_strict=fields.boolean("strict") or False)


def read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Which tools are called, and whether several at once.

    Raises:
        InvalidRequest: naming the field.
    """
    choice = fields.object("tool_choice")
    if choice is None:
        return AUTO, True
    kind = choice.get("type")
    if kind not in _CHOICES:
        refuse("tool_choice.type", kind, f"one of {', '.join(_CHOICES)}")
    is_parallel = not choice.boolean("disable_parallel_tool_use")
    if kind == "none":
        return ToolChoice("none"), is_parallel
    if kind == "any":
        return check_choice(ToolChoice("required"), tools), is_parallel
    if kind == "tool":
        name = check_name("tool_choice.name", choice.get("name"))
        return check_choice(ToolChoice("named", name), tools, "tool_choice.name"), is_parallel
    return AUTO, is_parallel
