"""Replies of the pages, which go through Starlette: JSON, and errors in OpenAI's form."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from naru_proto.errors import NaruError
from naru_router.core.errors import error_body, error_shape

JSON = "application/json"


def json_page(value: object, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(orjson.dumps(value), status, media_type=JSON)


def refusal_page(error: NaruError) -> Response:
    """An error."""
    return Response(error_body(error), error_shape(error).status, media_type=JSON)
