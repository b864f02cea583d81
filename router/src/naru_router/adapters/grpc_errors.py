"""How a call of gRPC fails: its status, the error's code in the metadata, and google.rpc's details beside it.

Details: ErrorInfo with the code, BadRequest with the field at fault, RetryInfo where it makes sense to come again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from naru_proto import names
from naru_proto.errors import NaruError
from naru_router.core.errors import error_shape

DOMAIN = "naru.dev"
"""Of ErrorInfo: whose codes these are."""
METADATA_DETAILS = "grpc-status-details-bin"
FORGET_S = 0.1
"""After which nobody looks at the exception that ended a call any more."""


async def abort(context: Any, error: NaruError) -> None:
    """Ends a call.

    Raises:
        grpc.aio.AbortError: always.
    """
    status = getattr(grpc.StatusCode, error_shape(error).grpc)
    text = f"{error.param}: {error.message}" if error.param else error.message
    text = text.encode("utf-8", "replace").decode("utf-8")
    details = status_details(error, status.value[0], text).SerializeToString()
    _forget(error)
    try:
        await context.abort(status, text, ((names.METADATA_ERROR_CODE, error.code), (METADATA_DETAILS, details)))
    except grpc.aio.AbortError as aborted:
        # The call keeps it, and its traceback's frames keep the call: a ring with all of the request in it, which the
        # garbage collector would find late. It is done with in a moment.
        asyncio.get_running_loop().call_later(FORGET_S, _forget, aborted)
        raise


def _forget(error: BaseException) -> None:
    error.__traceback__ = error.__cause__ = error.__context__ = None


def status_details(error: NaruError, code: int, text: str) -> Any:
    """The google.rpc.Status of an error."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.code, domain=DOMAIN)]
    if error.param:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=_whole(error.param), description=_whole(error.message))
        details.append(bad)
    retry_after_s = error.retry_after_s if error.retry_after_s > 0 else error_shape(error).retry_after_s
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(min(retry_after_s, 3600) * 1000))
        details.append(retry)
    status = status_pb2.Status(code=code, message=text)
    for detail in details:
        packed: Any = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
