"""What a request's body must be before anything looks at it. Used by the generation endpoints."""

from __future__ import annotations

import re

from naru_proto.errors import InvalidRequest
from naru_router.adapters.http.messages import HttpRequest
from naru_router.core.json_body import parse_object

_PLAIN = frozenset({None, b"", b"application/json"})


def read_object(request: HttpRequest, max_bytes: int) -> dict[str, object]:
    """The body as a JSON object.

    Raises:
        InvalidRequest: not declared as JSON, larger than max_bytes, or not such an object.
    """
    content_type = request.header(b"content-type")
    if content_type not in _PLAIN:
        _check_content_type((content_type or b"").decode("latin-1"))
    if request.is_body_too_large:
        raise InvalidRequest(f"the body is larger than the limit of {max_bytes} bytes; send a shorter request")
    return parse_object(request.body)


def _check_content_type(content_type: str) -> None:
    # Absent means that the client left it to us; a form or text would only fail later and less clearly.
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    is_json = media_type == "application/json" or re.fullmatch(r"application/[^/]+\+json", media_type)
    if not is_json:
        raise InvalidRequest(f"the content type is {content_type[:100]!r}; send application/json")
    charset = parameters.lower().partition("charset=")[2].partition(";")[0].strip(' "')
    if charset not in ("", "utf-8", "utf8"):
        raise InvalidRequest(f"the charset is {charset[:40]!r}; JSON is sent as utf-8")
