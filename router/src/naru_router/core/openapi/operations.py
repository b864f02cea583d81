"""Paths of the description: what is asked with which body, and which replies come. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_router.core.openapi.words import Schema, ref

JSON = "application/json"
EVENTS = "text/event-stream"
_SUMMARY = {
    400: "The request can never be served as it is; the error names the field.",
    401: "No key, or none that is known.",
    404: "There is no such thing, or none that the caller may see.",
    409: "It cannot be done in the state that it is in.",
    413: "The body is larger than the limit.",
    424: "The model's files cannot be served.",
    429: "A limit is reached, of this server or of the caller's quotas; Retry-After says when to come again.",
    500: "A fault of the server.",
    503: "No worker can serve it now; Retry-After says when to come again.",
    504: "The time that the request was given is over.",
}
ANY_REQUEST = (400, 401, 404, 424, 429, 500, 503, 504)
"""Of what models answer."""
PAGE = (400, 401, 404, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    tag: str
    summary: str
    reply: Schema | None = None
    """JSON of the reply; None: it has another type, or none."""
    body: Schema | None = None
    reply_types: tuple[str, ...] = (JSON,)
    """Further types beside JSON come without a schema."""
    statuses: tuple[int, ...] = PAGE
    error: Schema = field(default_factory=lambda: ref("Error"))
    parameters: tuple[Mapping[str, object], ...] = ()
    body_type: str = JSON
    needs_body: bool = True
    status: int = 200
    further: Mapping[int, Schema] = field(default_factory=dict)
    """Replies that are neither errors nor the usual one."""

    def to_json(self) -> dict[str, object]:
        """The operation object."""
        content: dict[str, object] = {kind: {} for kind in self.reply_types}
        if self.reply is not None:
            content[self.reply_types[0]] = {"schema": self.reply}
        responses: dict[str, object] = {str(self.status): {"description": "The reply.", "content": content}}
        for status, schema in self.further.items():
            responses[str(status)] = {"description": "The state.", "content": {JSON: {"schema": schema}}}
        for status in self.statuses:
            responses[str(status)] = {"description": _SUMMARY[status], "content": {JSON: {"schema": self.error}}}
        made: dict[str, object] = {
            "tags": [self.tag],
            "summary": self.summary,
            "operationId": _operation_id(self.method, self.path),
            "responses": responses,
        }
        if self.parameters:
            made["parameters"] = list(self.parameters)
        if self.body is not None:
            made["requestBody"] = {"required": self.needs_body, "content": {self.body_type: {"schema": self.body}}}
        return made


def path_parameter(name: str, about: str, example: str = "", **schema: object) -> dict[str, object]:
    """A part of the path."""
    made: dict[str, object] = {
        "name": name,
        "in": "path",
        "required": True,
        "description": about,
        "schema": {"type": "string", "minLength": 1, **schema},
    }
    return {**made, "example": example} if example else made


def query_parameter(name: str, about: str, schema: Schema) -> dict[str, object]:
    """A part of the query."""
    return {"name": name, "in": "query", "required": False, "description": about, "schema": schema}


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "_").strip("/").split("/")
    return "_".join([method.lower(), *words])
