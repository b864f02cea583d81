"""How a shared error looks at the edges: one table to HTTP status and OpenAI's error object, and to gRPC status."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import orjson

from naru_proto.errors import NaruError, Unavailable

_MAX_RETRY_AFTER_S = 3600


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """One row: what a code becomes."""

    status: int
    type: str
    """OpenAI's `error.type`."""
    grpc: str
    """Name of the gRPC status code."""
    retry_after_s: int | None = None
    """Value of Retry-After, where trying again makes sense."""


_TABLE: dict[str, ErrorShape] = {
    "invalid_request_error": ErrorShape(400, "invalid_request_error", "INVALID_ARGUMENT"),
    "context_length_exceeded": ErrorShape(400, "invalid_request_error", "INVALID_ARGUMENT"),
    "model_not_found": ErrorShape(404, "invalid_request_error", "NOT_FOUND"),
    "not_found": ErrorShape(404, "invalid_request_error", "NOT_FOUND"),
    "model_load_failed": ErrorShape(424, "server_error", "FAILED_PRECONDITION"),
    "rate_limit_exceeded": ErrorShape(429, "rate_limit_error", "RESOURCE_EXHAUSTED", 1),
    "quota_exceeded": ErrorShape(429, "rate_limit_error", "RESOURCE_EXHAUSTED", 1),
    "service_unavailable": ErrorShape(503, "server_error", "UNAVAILABLE", 2),
    "deadline_exceeded": ErrorShape(504, "server_error", "DEADLINE_EXCEEDED"),
    "invalid_api_key": ErrorShape(401, "authentication_error", "UNAUTHENTICATED"),
    "cancelled": ErrorShape(499, "server_error", "CANCELLED"),
    "internal_error": ErrorShape(500, "server_error", "INTERNAL"),
}


def with_eta(error: NaruError, eta_s: float) -> NaruError:
    """The error, saying when to come back where it is one of a model whose load has `eta_s` left (0: unknown)."""
    if error.code != Unavailable.code or error.retry_after_s > 0 or not eta_s > 0:
        return error
    timed = Unavailable(error.message, param=error.param)
    timed.retry_after_s = eta_s
    return timed


def error_shape(error: NaruError) -> ErrorShape:
    """The row of an error; unknown codes are our own fault."""
    shape = _TABLE.get(error.code, _TABLE["internal_error"])
    if error.retry_after_s > 0 and shape.retry_after_s is not None:
        return dataclasses.replace(shape, retry_after_s=math.ceil(min(error.retry_after_s, _MAX_RETRY_AFTER_S)))
    return shape


def error_body(error: NaruError) -> bytes:
    """OpenAI's error object as JSON on one line."""
    shape = error_shape(error)
    code = None if error.code == shape.type else error.code
    return openai_error(error.message, shape.type, error.param or None, code)


def openai_error(message: str, error_type: str, param: str | None, code: str | None) -> bytes:
    """OpenAI's error object as JSON on one line."""
    param = param and _whole(param)
    return orjson.dumps({"error": {"message": _whole(message), "type": error_type, "param": param, "code": code}})


def _whole(text: str) -> str:
    # A message may quote half of a surrogate pair, which JSON in UTF-8 cannot carry.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
