"""What a request says of tools: which there are, which may or must be called. Read by the parsers of all chat APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import Fields, refuse, shown
from naru_router.core.json_values import check_json

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's message made."""

    call_id: str
    name: str
    arguments: str
    """JSON text, as the client sent it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    """JSON Schema of its arguments; None: it takes none."""
    is_strict: bool = False
    """Its arguments have to fit the schema."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    """Of the tool, where it is named."""


AUTO = ToolChoice()


def read_tools(fields: Fields, name: str = "tools") -> tuple[Tool, ...]:
    """The tools of a body in OpenAI's form; absent and empty: none.

    Raises:
        InvalidRequest: naming the tool and what is wrong with it.
    """
    values = fields.array(name) or []
    tools = []
    for index, value in enumerate(values):
        path = fields.path(f"{name}[{index}]")
        if not isinstance(value, dict):
            refuse(path, value, "an object with type and function")
        tool = Fields(value, f"{path}.")
        kind = tool.get("type")
        if kind != "function":
            refuse(tool.path("type"), kind, "function: no other tools are offered here")
        function = tool.object("function")
        if function is None:
            refuse(tool.path("function"), None, "an object with a name")
        tools.append(read_function(function))
    return check_tools(tools, fields.path(name))


def read_function(fields: Fields) -> Tool:
    """One tool: name, description, parameters, strict.

    Raises:
        InvalidRequest: naming the field.
    """
    parameters = fields.object("parameters")
    schema = fields.get("parameters")
    if parameters is not None:
        check_json(fields.path("parameters"), schema)
        kind = parameters.get("type")
        if kind not in (None, "object"):
            refuse(parameters.path("type"), kind, "object: the arguments of a tool are one")
    return Tool(
        check_name(fields.path("name"), fields.get("name")),
        fields.text("description") or "",
        schema if isinstance(schema, dict) else None,
        fields.boolean("strict") or False,
    )


def check_name(path: str, value: object) -> str:
    """The name of a tool.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        refuse(path, value, "a name of 1 to 128 letters, digits, underscores, hyphens and dots")
    return value


def check_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """The tools, where there are not too many and each has a name of its own.

    Raises:
        InvalidRequest: naming the second one.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{param} has {len(tools)} entries; at most {MAX_TOOLS} are allowed", param=param)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            message = f"{param} has two tools of the name {tool.name!r}; give each its own"
            raise InvalidRequest(message, param=f"{param}[{index}]")
        names.add(tool.name)
    return tuple(tools)


def read_tool_choice(fields: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice` of a body in OpenAI's form; absent: auto.

    Raises:
        InvalidRequest: not understood, or it cannot be followed with these tools.
    """
    path, value = fields.path("tool_choice"), fields.get("tool_choice")
    if value is None:
        return AUTO
    for mode in _MODES:
        if value == mode:
            return check_choice(ToolChoice(mode), tools, path)  # type: ignore[arg-type]
    wanted = 'auto, none, required or {"type": "function", "function": {"name": …}}'
    if not isinstance(value, dict) or value.get("type") != "function":
        refuse(path, value.get("type") if isinstance(value, dict) else value, wanted)
    choice = Fields(value, f"{path}.")
    function = choice.object("function") or choice  # the form of the Responses API has the name beside the type
    name = check_name(function.path("name"), function.get("name"))
    return check_choice(ToolChoice("named", name), tools, path)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], param: str = "tool_choice") -> ToolChoice:
    """The choice, where it can be followed with these tools.

    Raises:
        InvalidRequest: a call is required and there is nothing to call, or not that.
    """
    if choice.mode in ("auto", "none"):
        return choice
    if not tools:
        wish = choice.mode if choice.mode == "required" else shown(choice.name)
        raise InvalidRequest(f"{param} is {wish} and there are no tools; send tools or leave it out", param=param)
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools[:20])
        raise InvalidRequest(f"{param} names {choice.name!r}, which is none of the tools: {known}", param=param)
    return choice
