"""What comes with a call beside its content: who sends it, how urgent it is, how long it is of use, what it belongs to.

Read by both edges, from HTTP headers and body or from gRPC metadata; carried into the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from naru_proto import names
from naru_proto.errors import InvalidRequest
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.fields import shown

PRIORITIES = (-100, 100)
MAX_TIMEOUT_S = 86_400.0
MAX_SESSION_CHARS = 256
_WHOLE = re.compile(r"[+-]?[0-9]{1,6}")
_DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True)
class Envelope:
    """Of one call."""

    caller: Caller = ANYONE
    request_id: str = ""
    priority: int = 0
    """Lower is sooner; never below what the caller may ask for."""
    timeout_s: float = 0.0
    """Of no use after so many seconds; 0: no limit."""
    session: str = ""
    """Names what belongs together; empty: the prompt says it."""
    is_explained: bool = False
    """The reply is to say where the request went and why."""


NO_ENVELOPE = Envelope()


def read_envelope(
    get: Callable[[str], str | None],
    caller: Caller,
    request_id: str,
    *,
    priority: object = None,
    cache_key: object = None,
) -> Envelope:
    """The envelope of a call.

    Args:
        get: a header's or metadata's text by its lower-case name, None where it is absent.
        caller: who sends it.
        request_id: of the call.
        priority: the body's `priority`; the header wins.
        cache_key: the body's `prompt_cache_key`; the header x-session-id wins.

    Raises:
        InvalidRequest: naming the header or field and its value.
    """
    return Envelope(
        caller=caller,
        request_id=request_id,
        priority=max(_priority(get(names.HEADER_PRIORITY), priority), caller.top_priority),
        timeout_s=_timeout_s(get(names.HEADER_TIMEOUT)),
        session=_session(get(names.HEADER_SESSION), cache_key),
        is_explained=(get(names.HEADER_EXPLAIN) or "0").strip().lower() not in ("", "0", "false"),
    )


def _priority(header: str | None, field: object) -> int:
    low, high = PRIORITIES
    name, value = (names.HEADER_PRIORITY, header) if header is not None else ("priority", field)
    if value is None:
        return 0
    if isinstance(value, str) and header is not None and _WHOLE.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must be an integer in [{low}, {high}], lower is sooner", param=name
        )
    return value


def _timeout_s(header: str | None) -> float:
    if header is None:
        return 0.0
    text = header.strip()
    seconds = float(text) if _DECIMAL.fullmatch(text) else 0.0
    if not 0.0 < seconds <= MAX_TIMEOUT_S:
        name = names.HEADER_TIMEOUT
        message = f"{name} is {shown(header)}; it must be seconds above 0 and at most {MAX_TIMEOUT_S:g}, like 30 or 2.5"
        raise InvalidRequest(message, param=name)
    return seconds


def _session(header: str | None, field: object) -> str:
    name, value = (names.HEADER_SESSION, header) if header is not None else ("prompt_cache_key", field)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_SESSION_CHARS:
        message = f"{name} is {shown(value)}; it must be a text of at most {MAX_SESSION_CHARS} characters"
        raise InvalidRequest(message, param=name)
    return value
