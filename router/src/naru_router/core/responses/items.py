"""Input items of the Responses API: checked, given ids, and in the form in which they are stored and listed."""

from __future__ import annotations

import re
from collections.abc import Callable

from naru_router.core.fields import Fields, check_text, refuse

Object = dict[str, object]
ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_items(value: object, answer_id: str) -> list[Object]:
    """The items of `input`, which may be a text. `answer_id` makes the ids of those that have none.

    Raises:
        InvalidRequest: naming the item that is not understood.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        refuse("input", value, "a string or an array of at least one item")
    items = []
    for index, item in enumerate(value):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            refuse(path, item, "an object")
        items.append(_read_item(Fields(item, f"{path}."), f"{answer_id}_in{index}"))
    return items


def _read_item(fields: Fields, fresh_id: str) -> Object:
    kind = fields.get("type")
    if kind is None and fields.get("role") is not None:
        kind = "message"
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        refuse(fields.path("type"), kind, f"one of {', '.join(_READERS)}: other items are not supported")
    return read(fields, fresh_id)


def _read_message(fields: Fields, fresh_id: str) -> Object:
    role = fields.get("role")
    if role not in ROLES:
        refuse(fields.path("role"), role, f"one of {', '.join(ROLES)}")
    content, path = fields.get("content"), fields.path("content")
    if isinstance(content, str):
        texts = [check_text(path, content)]
    elif isinstance(content, list) and content:
        texts = [_part_text(f"{path}[{i}]", part) for i, part in enumerate(content)]
    else:
        refuse(path, content, "a string or an array of text parts")
    parts: list[Object] = [{"type": "input_text", "text": text} for text in texts]
    if role == "assistant":
        parts = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return {
        "id": _id(fields, "msg", fresh_id),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": parts,
    }


def _read_call(fields: Fields, fresh_id: str) -> Object:
    return {
        "id": _id(fields, "fc", fresh_id),
        "type": "function_call",
        "status": "completed",
        "call_id": _filled(fields, "call_id"),
        "name": _filled(fields, "name"),
        "arguments": check_text(fields.path("arguments"), fields.get("arguments")),
    }


def _read_output(fields: Fields, fresh_id: str) -> Object:
    path, output = fields.path("output"), fields.get("output")
    if isinstance(output, list):
        text = "".join([_part_text(f"{path}[{i}]", part) for i, part in enumerate(output)])
    else:
        text = check_text(path, output)
    call_id = _filled(fields, "call_id")
    made = {"id": _id(fields, "fco", fresh_id), "type": "function_call_output", "status": "completed"}
    return {**made, "call_id": call_id, "output": text}


def _read_reasoning(fields: Fields, fresh_id: str) -> Object:
    made: Object = {"id": _id(fields, "rs", fresh_id), "type": "reasoning"}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts: list[Object] = []
        for index, part in enumerate(fields.array(name) or []):
            path = f"{fields.path(name)}[{index}]"
            if not isinstance(part, dict) or part.get("type") != kind:
                refuse(f"{path}.type", part.get("type") if isinstance(part, dict) else part, kind)
            parts.append({"type": kind, "text": check_text(f"{path}.text", part.get("text"))})
        made[name] = parts
    return made


_READERS: dict[str, Callable[[Fields, str], Object]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def _part_text(path: str, part: object) -> str:
    if not isinstance(part, dict):
        refuse(path, part, "an object with a type")
    kind = part.get("type")
    if kind == "refusal":
        return check_text(f"{path}.refusal", part.get("refusal"))
    if kind not in _TEXTS:
        refuse(f"{path}.type", kind, "input_text or output_text: other parts are not supported by this model")
    return check_text(f"{path}.text", part.get("text"))


def _id(fields: Fields, prefix: str, fresh_id: str) -> str:
    given = fields.text("id")
    if given is None:
        return f"{prefix}_{fresh_id}"
    if not _ID.fullmatch(given):
        refuse(fields.path("id"), given, "1 to 128 letters, digits, _ and -")
    return given


def _filled(fields: Fields, name: str) -> str:
    text = check_text(fields.path(name), fields.get(name))
    if not text:
        refuse(fields.path(name), text, "a text that is not empty")
    return text
