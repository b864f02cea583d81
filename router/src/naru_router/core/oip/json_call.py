"""Infer requests as HTTP carries them: a JSON object, and where tensors are sent as binary data, their bytes after it.

The bytes stand in the order of the inputs that say `binary_data_size`; the object's length is in a header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.fields import Fields, check_integer, check_text, refuse, shown
from naru_router.core.oip.calls import (
    InferCall,
    check_call_id,
    check_count,
    check_parameters,
    check_size,
    check_tensor_parameters,
)
from naru_router.core.oip.datatypes import check_datatype
from naru_router.core.oip.tensors import check_raw, check_shape, tensor_of_json

HEADER_LENGTH = "inference-header-content-length"
_WHOLE = re.compile(r"[0-9]{1,12}")
_BINARY_SIZE = "binary_data_size"


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call, and how its outputs are to be sent."""

    call: InferCall
    is_binary: bool
    """Outputs that say nothing of it are sent as binary data."""
    binary: dict[str, bool]
    """Of outputs that say something of it."""

    def sends_binary(self, output: str) -> bool:
        """Whether an output is sent as binary data."""
        return self.binary.get(output, self.is_binary)


def header_length(text: str | None, num_bytes: int) -> int:
    """Bytes of the JSON object of a body of `num_bytes`; absent: it is the whole body.

    Raises:
        InvalidRequest: no such number, or beyond the body.
    """
    if text is None:
        return num_bytes
    length = int(text) if _WHOLE.fullmatch(text.strip()) else -1
    if not 0 < length <= num_bytes:
        message = f"the header {HEADER_LENGTH} is {shown(text)}; the JSON object must be 1 to {num_bytes} bytes long"
        raise InvalidRequest(message, param=HEADER_LENGTH)
    return length


def parse_infer(body: dict[str, object], binary: bytes, model: str, version: str) -> JsonCall:
    """Reads an infer request.

    Args:
        body: the JSON object.
        binary: what follows it.
        model: of the path.
        version: of the path; may be empty.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    parameters = _parameters(fields)
    check_parameters(parameters)
    inputs = _read_inputs(fields, binary)
    outputs, told = _read_outputs(fields)
    is_binary = _boolean("parameters.binary_data_output", parameters.get("binary_data_output")) or False
    call_id = check_call_id(fields.get("id") or "")
    call = InferCall(model, version, call_id, inputs, outputs, parameters)
    return JsonCall(call, is_binary, told)


def _read_inputs(fields: Fields, binary: bytes) -> tuple[Tensor, ...]:
    items = fields.array("inputs")
    if not items:
        refuse("inputs", fields.get("inputs"), "an array of tensors, not empty")
    check_count("inputs", items)
    inputs, at = [], 0
    for i, item in enumerate(items):
        tensor, num_bytes = _read_input(f"inputs[{i}]", item, binary, at)
        inputs.append(tensor)
        at += num_bytes
    if at != len(binary):
        message = f"{len(binary)} bytes of binary data follow the JSON object, and the inputs claim {at} of them"
        raise InvalidRequest(message, param="inputs")
    check_size(inputs)
    return tuple(inputs)


def _read_input(path: str, item: object, binary: bytes, at: int) -> tuple[Tensor, int]:
    """The tensor, and how many bytes of the binary data it took."""
    if not isinstance(item, dict):
        refuse(path, item, "an object")
    fields = Fields(item, f"{path}.")
    name = check_text(fields.path("name"), fields.get("name"))
    datatype = check_datatype(fields.path("datatype"), fields.get("datatype"))
    shape = check_shape(fields.path("shape"), fields.get("shape"))
    parameters = _parameters(fields)
    check_tensor_parameters(path, parameters)
    size, data = parameters.get(_BINARY_SIZE), fields.get("data")
    data_path = fields.path("data")
    if size is None:
        return tensor_of_json(data_path, name, datatype, shape, data), 0
    size_path = f"{path}.parameters.{_BINARY_SIZE}"
    if data is not None:
        raise InvalidRequest(f"{path} has data and {_BINARY_SIZE}; send one of them", param=size_path)
    rest = len(binary) - at
    num_bytes = check_integer(size_path, size, 0, 2**63 - 1)
    if num_bytes > rest:
        message = f"{size_path} is {num_bytes}; only {rest} bytes of binary data are left"
        raise InvalidRequest(message, param=size_path)
    tensor = Tensor(name=name, datatype=datatype, shape=shape, data=binary[at : at + num_bytes])
    check_raw(data_path, tensor)
    return tensor, num_bytes


def _read_outputs(fields: Fields) -> tuple[tuple[str, ...], dict[str, bool]]:
    items = fields.array("outputs") or []
    check_count("outputs", items)
    names, told = [], {}
    for i, item in enumerate(items):
        path = f"outputs[{i}]"
        if not isinstance(item, dict):
            refuse(path, item, "an object")
        output = Fields(item, f"{path}.")
        name = check_text(output.path("name"), output.get("name"))
        parameters = _parameters(output)
        check_tensor_parameters(path, parameters)
        is_binary = _boolean(f"{path}.parameters.binary_data", parameters.get("binary_data"))
        if is_binary is not None:
            told[name] = is_binary
        names.append(name)
    return tuple(names), told


def _parameters(fields: Fields) -> dict[str, object]:
    value = fields.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(fields.path("parameters"), value, "an object")
    return value


def _boolean(path: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        refuse(path, value, "true or false")
    return value
