"""Finish reasons of the wire in OpenAI's words."""

from __future__ import annotations

from naru_proto.errors import InternalError
from naru_proto.v1 import inference_pb2

_NAMES: dict[int, str] = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


def finish_name(reason: int) -> str:
    """``stop`` or ``length``.

    Raises:
        InternalError: a reason that no answer may end with.
    """
    try:
        return _NAMES[reason]
    except KeyError:
        raise InternalError(f"the worker ended a choice with reason {reason}; send the request again") from None
