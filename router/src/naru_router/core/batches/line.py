"""One line of a batch's input, checked, and the lines of its outputs. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

import orjson

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import shown
from naru_router.core.json_body import parse_object

MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """What a line asks."""

    custom_id: str
    body: dict[str, object]

    def request(self) -> bytes:
        """The body to send."""
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


class LineFault(Exception):
    """What is wrong with a line, in OpenAI's words for it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_line(data: bytes, endpoint: str) -> Line:
    """Reads one line of a file.

    Raises:
        LineFault: it is no request for this endpoint.
    """
    try:
        value = parse_object(data)
    except InvalidRequest as exc:
        raise LineFault("invalid_json_line", exc.message.replace("the body", "the line", 1)) from exc
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
        wanted = f"a string of 1 to {MAX_ID_CHARS} characters"
        raise _wrong("custom_id", custom_id, wanted, "missing_required_parameter" if custom_id is None else "invalid")
    if value.get("method") != "POST":
        raise _wrong("method", value.get("method"), "POST", "invalid_method")
    if value.get("url") != endpoint:
        raise _wrong("url", value.get("url"), f"the batch's endpoint {endpoint}", "invalid_url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise _wrong("body", body, "the request's JSON object", "missing_required_parameter")
    if not isinstance(body.get("model"), str):
        raise _wrong("body.model", body.get("model"), "the name of a model", "missing_required_parameter")
    if body.get("stream") not in (None, False):
        raise _wrong("body.stream", body.get("stream"), "absent: answers of a batch are not streamed", "invalid_stream")
    try:
        line = Line(custom_id, body)
        line.request()
        custom_id.encode("utf-8")
    except ValueError as exc:  # half of a surrogate pair, a number without an end
        raise LineFault("invalid_json_line", f"the line holds what JSON in UTF-8 cannot carry: {exc}") from exc
    return line


def output_line(item_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output or error file, without its end: what the endpoint has answered, as it has."""
    head = orjson.dumps({"id": item_id, "custom_id": custom_id})[:-1]
    body = body.replace(b"\n", b" ")  # between values alone: inside a string it is written as an escape
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, orjson.dumps(request_id), body)
    return b'%b,"response":%b,"error":null}' % (head, response)


def error_line(item_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file, without its end: of a request that was never answered."""
    error = {"code": code, "message": message}
    return orjson.dumps({"id": item_id, "custom_id": custom_id, "response": None, "error": error})


def _wrong(name: str, value: object, wanted: str, code: str) -> LineFault:
    return LineFault(code, f"{name} is {shown(value)}; it must be {wanted}", name)
