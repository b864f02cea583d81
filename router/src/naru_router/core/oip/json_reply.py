"""Replies of infer requests as HTTP carries them; outputs asked for as binary data stand after the JSON object."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from naru_proto.errors import InternalError, InvalidRequest
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.oip.datatypes import unpack_elements
from naru_router.core.oip.json_call import JsonCall
from naru_router.core.oip.kinds import VERSION
from naru_router.core.oip.tensors import check_raw


def infer_reply(asked: JsonCall, outputs: Sequence[Tensor]) -> tuple[bytes, int]:
    """The body, and the length of its JSON object where binary data follows it; else 0. No finite number: null.

    Raises:
        InvalidRequest: an output cannot be told in JSON.
        InternalError: an output is broken.
    """
    told: list[dict[str, object]] = []
    pieces: list[bytes] = []
    for tensor in outputs:
        check_output(tensor)
        output: dict[str, object] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if asked.sends_binary(tensor.name):
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            pieces.append(tensor.data)
        else:
            output["data"] = unpack_elements(f"output {tensor.name}", tensor.datatype, tensor.data)
        told.append(output)
    reply: dict[str, object] = {"model_name": asked.call.model, "model_version": VERSION, "outputs": told}
    if asked.call.call_id:
        reply["id"] = asked.call.call_id
    head = orjson.dumps(reply)
    return (b"".join((head, *pieces)), len(head)) if pieces else (head, 0)


def check_output(tensor: Tensor) -> None:
    """Checks what a worker sent.

    Raises:
        InternalError: its data is not what shape and datatype say.
    """
    try:
        check_raw(tensor.name, tensor)
    except (InvalidRequest, KeyError) as exc:
        raise InternalError(
            f"the worker sent {len(tensor.data)} bytes for the output {tensor.name!r} of {tensor.datatype} and shape "
            f"{list(tensor.shape)}: {exc}; send the request again"
        ) from exc
