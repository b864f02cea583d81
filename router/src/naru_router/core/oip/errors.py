"""The protocol's form of errors: ``{"error": "..."}``, in replies and in streams."""

from __future__ import annotations

import orjson

from naru_proto.errors import NaruError
from naru_router.core.error_forms import ErrorForm
from naru_router.core.sse import event


class OipErrors:
    """The message alone."""

    def body(self, error: NaruError) -> bytes:
        """JSON of a whole reply."""
        text = error.message
        return orjson.dumps({"error": text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")})

    def event(self, error: NaruError) -> bytes:
        """One event."""
        return event(self.body(error))


OIP_ERRORS: ErrorForm = OipErrors()
