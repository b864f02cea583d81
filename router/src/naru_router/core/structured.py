"""What the text of an answer must be, as bodies ask for it: `response_format`, and the fields vLLM's clients send.

Whether a schema, regular expression or grammar can be kept is found out by the worker, which compiles it.
"""

from __future__ import annotations

import json

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import Choices, StructuredOutput
from naru_router.core.fields import Fields, check_text, refuse
from naru_router.core.json_values import check_json

MAX_CHOICES = 4096
MAX_GRAMMAR_CHARS = 1024 * 1024
_FORMAT_NAME_CHARS = 64
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FIELDS = ("response_format", "structured_outputs", *_GUIDED)


def read_structured(fields: Fields) -> StructuredOutput | None:
    """What a body asks the text to be; None: free text.

    Raises:
        InvalidRequest: not understood, or several at once.
    """
    found: list[StructuredOutput] = []
    response_format = fields.object("response_format")
    if response_format is not None:
        asked = read_response_format(response_format, fields.path("response_format"))
        if asked is not None:
            found.append(asked)
    for name, kind in _GUIDED.items():
        if fields.get(name) is not None:
            found.append(_of_kind(kind, fields.path(name), fields.get(name)))
    options = fields.object("structured_outputs")
    if options is not None:
        found += _read_options(options, fields.path("structured_outputs"))
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise InvalidRequest(f"{names} cannot be kept together; send one of them", param=found[-1].param)
    return found[0] if found else None


def read_response_format(fields: Fields, param: str) -> StructuredOutput | None:
    """`response_format` of chat and text completions; None: text.

    Raises:
        InvalidRequest: another type, or no schema where there must be one.
    """
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True, param=param)
    if kind != "json_schema":
        refuse(fields.path("type"), kind, "text, json_object or json_schema")
    described = fields.object("json_schema")
    if described is None:
        refuse(fields.path("json_schema"), None, "an object with name and schema")
    return read_named_schema(described, param)


def read_named_schema(fields: Fields, param: str) -> StructuredOutput:
    """An object with name, schema, strict: the schema is kept whether strict or not.

    Raises:
        InvalidRequest: no name, no schema, or one that is none.
    """
    name = fields.text("name")
    if not name or len(name) > _FORMAT_NAME_CHARS:
        refuse(fields.path("name"), name, f"a name of 1 to {_FORMAT_NAME_CHARS} characters")
    fields.text("description")
    fields.boolean("strict")
    if fields.get("schema") is None:
        refuse(fields.path("schema"), None, "a JSON Schema")
    return schema_output(fields.get("schema"), fields.path("schema"), param)


def schema_output(schema: object, path: str, param: str) -> StructuredOutput:
    """JSON that fits a schema.

    Raises:
        InvalidRequest: it is no object, or holds what JSON cannot carry.
    """
    if not isinstance(schema, dict):
        refuse(path, schema, "a JSON Schema: an object")
    return StructuredOutput(json_schema=schema_text(check_json(path, schema)), param=param)


def schema_text(schema: object) -> str:
    """A checked schema as text."""
    return json.dumps(schema, ensure_ascii=False, allow_nan=False)


def _read_options(options: Fields, path: str) -> list[StructuredOutput]:
    found = []
    for name in ("json", "regex", "choice", "grammar"):
        if options.get(name) is not None:
            found.append(_of_kind(name, options.path(name), options.get(name)))
    if options.boolean("json_object"):
        found.append(StructuredOutput(json_object=True, param=options.path("json_object")))
    if options.get("structural_tag") is not None:
        refuse(options.path("structural_tag"), options.get("structural_tag"), "absent: it is not supported")
    if not found:
        refuse(path, {}, "an object with one of json, regex, choice, grammar, json_object")
    return found


def _of_kind(kind: str, path: str, value: object) -> StructuredOutput:
    if kind == "json":
        return schema_output(_schema_of(path, value), path, path)
    if kind == "choice":
        return StructuredOutput(choice=Choices(texts=_read_choices(path, value)), param=path)
    text = check_text(path, value)
    if not text or len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{path} has {len(text)} characters; 1 to {MAX_GRAMMAR_CHARS} are allowed", param=path)
    if kind == "regex":
        return StructuredOutput(regex=text, param=path)
    return StructuredOutput(grammar=text, param=path)


def _schema_of(path: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        refuse(path, value, "a JSON Schema, or its text")


def _read_choices(path: str, value: object) -> list[str]:
    if not isinstance(value, list) or not value or len(value) > MAX_CHOICES:
        refuse(path, value, f"an array of 1 to {MAX_CHOICES} strings")
    return [check_text(f"{path}[{index}]", text) for index, text in enumerate(value)]
