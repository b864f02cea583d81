"""Errors the parts share, grouped by what the caller can do.

    NaruError                      code, message, param, retryable
    ├── InvalidRequest             the caller's fault: change the request (400)
    │   ├── ContextLengthExceeded  prompt does not fit the model (400)
    │   └── StaleCommand           a newer command was seen: ask with the newest generation (409)
    ├── Unauthenticated            no key, or none that is known (401)
    ├── ModelNotFound              no such model, or none that the caller may see (404)
    ├── NotFound                   no such file, batch or response, or none of the caller's (404)
    ├── LoadError                  a model's files cannot be served (424)
    ├── Overloaded                 try again later (429)
    │   └── QuotaExceeded          the tenant has used what it may (429)
    ├── Unavailable                no worker can serve it now; another may (503)
    ├── Cancelled                  the caller left (499)
    ├── DeadlineExceeded           the time that the caller gave is over (504)
    └── InternalError              our fault (500)

Each crosses the wire as `naru.v1.Error`. One table per edge maps them to HTTP or gRPC status.
"""

from __future__ import annotations

from typing import ClassVar


class NaruError(Exception):
    """Base of all errors that may reach a user. The message says what was wrong, the value, and what to do."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = 0.0
        """When it may be worth to ask again; 0: not known."""


class InvalidRequest(NaruError):
    """The request can never be served as it is."""

    code = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt (or prompt and output) does not fit the model's context or its memory."""

    code = "context_length_exceeded"


class StaleCommand(InvalidRequest):
    """A command about a model is older than one seen; nothing was changed."""

    code = "stale_command"

    def __init__(self, message: str, *, param: str = "generation", newest_generation: int = 0) -> None:
        super().__init__(message, param=param)
        self.newest_generation = newest_generation
        """What has been seen."""


class ModelNotFound(NaruError):
    """The name is not served here."""

    code = "model_not_found"


class NotFound(NaruError):
    """No such thing, or none that the caller may see: a file, a batch, a stored response."""

    code = "not_found"


class LoadError(NaruError):
    """A model cannot be loaded; names file and field."""

    code = "model_load_failed"


class Overloaded(NaruError):
    """A limit is reached; the same request may work later."""

    code = "rate_limit_exceeded"
    retryable = True


class QuotaExceeded(Overloaded):
    """The tenant has used what it may in this window."""

    code = "quota_exceeded"


class Unavailable(NaruError):
    """This worker cannot serve it now; another one may."""

    code = "service_unavailable"
    retryable = True


class Cancelled(NaruError):
    """The caller cancelled the request."""

    code = "cancelled"


class DeadlineExceeded(NaruError):
    """The time that the caller gave is over."""

    code = "deadline_exceeded"


class Unauthenticated(NaruError):
    """The request names no tenant that is known."""

    code = "invalid_api_key"


class InternalError(NaruError):
    """A fault of ours."""

    code = "internal_error"
    retryable = True


BY_CODE: dict[str, type[NaruError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        StaleCommand,
        ModelNotFound,
        NotFound,
        LoadError,
        Overloaded,
        QuotaExceeded,
        Unavailable,
        Cancelled,
        DeadlineExceeded,
        Unauthenticated,
        InternalError,
    )
}
"""Wire code to class, to raise on the other side what was raised on this one."""
