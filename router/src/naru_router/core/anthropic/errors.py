"""Errors in the form of the Messages API. The status is the one that every API of the router gives."""

from __future__ import annotations

from naru_proto.errors import NaruError
from naru_router.core.errors import error_shape
from naru_router.core.named_events import named_event
from naru_router.core.sse import dump

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""All others are an `api_error`."""


class AnthropicErrors:
    """``{"type": "error", "error": {...}, "request_id": ...}``."""

    def __init__(self, request_id: str) -> None:
        """`request_id`: of the exchange."""
        self._request_id = request_id

    def body(self, error: NaruError) -> bytes:
        """JSON of a whole reply."""
        return dump(self._object(error))

    def event(self, error: NaruError) -> bytes:
        """An `error` event; no `message_stop` follows it."""
        return named_event(self._object(error))

    def _object(self, error: NaruError) -> dict[str, object]:
        # A message may quote half of a surrogate pair, which UTF-8 cannot carry.
        message = error.message.encode("utf-8", "replace").decode("utf-8")
        kind = _TYPES.get(error_shape(error).status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": self._request_id}
