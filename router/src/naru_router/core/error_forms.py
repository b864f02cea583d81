"""How an API tells errors: the body of a reply, and the event of a stream that has begun. One form an API.

Used by the generation endpoints; the status comes from `core.errors` for all of them.
"""

from __future__ import annotations

from typing import Protocol

from naru_proto.errors import NaruError
from naru_router.core.errors import error_body
from naru_router.core.sse import event


class ErrorForm(Protocol):
    """One API's words for errors."""

    def body(self, error: NaruError) -> bytes:
        """JSON of a whole reply."""

    def event(self, error: NaruError) -> bytes:
        """Whole server-sent events that end a stream; no client takes them for success."""


class OpenAIErrors:
    """``{"error": {...}}``."""

    def body(self, error: NaruError) -> bytes:
        """JSON of a whole reply."""
        return error_body(error)

    def event(self, error: NaruError) -> bytes:
        """One event; no end mark follows it."""
        return event(error_body(error))


OPENAI_ERRORS: ErrorForm = OpenAIErrors()
