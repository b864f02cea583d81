"""What the API server can answer besides success, grouped by what the caller does about it.

    NaruError
    ├── Conflict            somebody wrote in between: read again, decide again
    ├── AlreadyExists       an object of that name is there: look whose it is
    ├── NotFound            the object, or its whole kind, is not there
    ├── Gone                a list's continuation has expired: list anew
    ├── Forbidden           the operator's Role lacks a permission: only a person can mend it
    ├── Denied              quota, Pod Security or another admission refused this object
    ├── NotLeader           this replica may not write (any more); nothing was sent
    ├── InvalidRequest
    │   └── Rejected        the object can never be accepted as it is
    └── Unavailable
        └── ApiAway         no answer, overload or a fault of the server, after a few attempts

Raised by the client alone. Messages hold neither bodies nor credentials.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from naru_proto.errors import InvalidRequest, NaruError, Unavailable

_MAX_DETAIL = 400
"""Characters of the API server's own words that a message takes."""
_VALUE = re.compile(r'Invalid value: (?:"(?:[^"\\]|\\.)*"|.*?): ', re.DOTALL)
"""The API server repeats refused values; a value may be a secret that somebody wrote into a manifest."""


class Conflict(NaruError):
    """The object has changed since it was read, or is another one of the same name."""

    code: ClassVar[str] = "kubernetes_conflict"
    retryable: ClassVar[bool] = True


class AlreadyExists(NaruError):
    """An object of that kind and name exists."""

    code: ClassVar[str] = "kubernetes_already_exists"


class NotFound(NaruError):
    """There is no such object, or no such kind."""

    code: ClassVar[str] = "kubernetes_not_found"


class Gone(NaruError):
    """What the request continues from has expired."""

    code: ClassVar[str] = "kubernetes_gone"
    retryable: ClassVar[bool] = True


class Forbidden(NaruError):
    """The operator's credentials do not allow it."""

    code: ClassVar[str] = "kubernetes_forbidden"


class Denied(NaruError):
    """Admission refused the object: quota, Pod Security, a policy."""

    code: ClassVar[str] = "kubernetes_denied"


class NotLeader(NaruError):
    """Another replica acts now; nothing was sent."""

    code: ClassVar[str] = "not_leader"


class Rejected(InvalidRequest):
    """The API server does not accept the object as it is."""

    code: ClassVar[str] = "kubernetes_rejected"


class ApiAway(Unavailable):
    """The API server does not answer, or not with sense."""

    code: ClassVar[str] = "kubernetes_away"


def error_of(status: int, answer: dict[str, Any], verb: str, target: str) -> NaruError:
    """The error for an answer that is none of success.

    ``status``: HTTP status. ``answer``: the parsed Status object, or empty. ``verb``, ``target``: what was tried, such
    as ("create", "pods in namespace 'a'").
    """
    detail = told(answer)
    what = f"cannot {verb} {target}"
    if status == 429 or status >= 500:
        return ApiAway(f"{what}: the API server answered {status} {detail}".rstrip())
    if status == 403 and "exceeded quota" not in detail and "cannot " in detail:
        return Forbidden(f"{what}: the permission is missing; check the operator's Role and its binding")
    if status == 409 and answer.get("reason") == "AlreadyExists":
        return AlreadyExists(f"{what}: {detail}")
    kind = _KINDS.get(status, Rejected)
    return kind(f"{what}: {_WORDS.get(status) or detail or f'the API server answered {status}'}")


_KINDS: dict[int, type[NaruError]] = {401: Forbidden, 403: Denied, 404: NotFound, 409: Conflict, 410: Gone}
_WORDS = {
    401: "the API server does not know the operator's credentials; check its token",
    404: "not found",
    410: "expired; list anew",
}


def told(answer: dict[str, Any]) -> str:
    """The API server's own words, on one line, cut, without the values it refuses."""
    words = " ".join(_VALUE.sub("Invalid value: ", str(answer.get("message") or "")).split())
    return words if len(words) <= _MAX_DETAIL else words[: _MAX_DETAIL - 1] + "…"
