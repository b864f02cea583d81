"""Errors as gRPC status codes: the one table, and the guard around every call."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from naru_proto import errors, names

_log = logging.getLogger(__name__)

STATUS_CODES: dict[type[errors.NaruError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextLengthExceeded: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StaleCommand: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.LoadError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_Method = TypeVar("_Method", bound=Callable[..., Any])


async def abort(context: Any, error: errors.NaruError) -> NoReturn:
    """Ends the call with the status of `error`."""
    metadata: tuple[tuple[str, str], ...] = ((names.METADATA_ERROR_CODE, error.code),)
    if isinstance(error, errors.StaleCommand):
        metadata += ((names.METADATA_GENERATION, str(error.newest_generation)),)
    await context.abort(STATUS_CODES.get(type(error), grpc.StatusCode.INTERNAL), error.message, metadata)
    raise AssertionError("abort returned")


def guarded(method: Callable[[Any, Any, Any], Awaitable[Any]]) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """A unary method whose errors become statuses; unknown ones are logged and told as ours."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except errors.NaruError as error:
            await abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as exc:
            # The top of a call: one faulty call must not tell its insides to the other side.
            await abort(context, _unexpected(method.__name__, exc))

    return call


def guarded_stream(
    method: Callable[[Any, Any, Any], AsyncIterator[Any]],
) -> Callable[[Any, Any, Any], AsyncIterator[Any]]:
    """The same for a method that yields replies."""

    @functools.wraps(method)
    async def call(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for reply in method(self, request, context):
                yield reply
        except errors.NaruError as error:
            await abort(context, error)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as exc:
            # As above.
            await abort(context, _unexpected(method.__name__, exc))

    return call


def _unexpected(name: str, exc: Exception) -> errors.InternalError:
    _log.error("call %s failed", name, exc_info=exc)
    return errors.InternalError(f"{name} failed inside the worker ({type(exc).__name__}); its log has the reason")
