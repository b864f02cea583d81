"""Infer requests and responses as gRPC carries them: elements in the field of their datatype, or raw bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.v1.open_inference_pb2 import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
)
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.oip.calls import (
    InferCall,
    check_call_id,
    check_count,
    check_parameters,
    check_size,
    check_tensor_parameters,
)
from naru_router.core.oip.datatypes import (
    BYTES,
    check_datatype,
    pack_bytes,
    pack_elements,
    split_bytes,
    unpack_elements,
    unpack_numbers,
)
from naru_router.core.oip.json_reply import check_output
from naru_router.core.oip.kinds import VERSION
from naru_router.core.oip.tensors import check_raw, check_shape, tensor_of_elements

_FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""Of InferTensorContents, by datatype; those that are not here are sent raw."""


def parse_infer_message(request: ModelInferRequest) -> InferCall:
    """Reads an infer request.

    Raises:
        InvalidRequest: naming the field.
    """
    parameters = values_of(request.parameters)
    check_parameters(parameters)
    check_count("inputs", request.inputs)
    check_count("outputs", request.outputs)
    raw = request.raw_input_contents
    if not request.inputs:
        raise InvalidRequest("inputs is empty; send the model's inputs", param="inputs")
    if raw and len(raw) != len(request.inputs):
        message = (
            f"raw_input_contents has {len(raw)} items for {len(request.inputs)} inputs; send all inputs raw, or none"
        )
        raise InvalidRequest(message, param="raw_input_contents")
    inputs = [_input(i, each, raw[i] if raw else None) for i, each in enumerate(request.inputs)]
    check_size(inputs)
    for i, output in enumerate(request.outputs):
        check_tensor_parameters(f"outputs[{i}]", values_of(output.parameters))
    return InferCall(
        request.model_name,
        request.model_version,
        check_call_id(request.id),
        tuple(inputs),
        tuple(output.name for output in request.outputs),
        parameters,
    )


def values_of(parameters: Mapping[str, InferParameter]) -> dict[str, object]:
    """Parameters as JSON would have them."""
    chosen = {name: (parameter, parameter.WhichOneof("parameter_choice")) for name, parameter in parameters.items()}
    return {name: getattr(parameter, field) for name, (parameter, field) in chosen.items() if field is not None}


def _input(index: int, message: ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    path = f"inputs[{index}]"
    datatype = check_datatype(f"{path}.datatype", message.datatype)
    shape = check_shape(f"{path}.shape", list(message.shape))
    check_tensor_parameters(path, values_of(message.parameters))
    told = [field.name for field, _ in message.contents.ListFields()]
    if raw is not None:
        if told:
            raise InvalidRequest(f"{path} has contents beside raw_input_contents; send one of them", param=path)
        tensor = Tensor(name=message.name, datatype=datatype, shape=shape, data=raw)
        check_raw(path, tensor)
        return tensor
    field = _FIELDS.get(datatype)
    if field is None:
        raise InvalidRequest(f"{path} is of {datatype}, which has no contents; send raw_input_contents", param=path)
    if any(name != field for name in told):
        message_text = f"{path}.contents has {', '.join(told)}; elements of {datatype} are in {field}"
        raise InvalidRequest(message_text, param=f"{path}.contents")
    path = f"{path}.contents.{field}"
    elements = list(getattr(message.contents, field))
    data = pack_bytes(elements) if datatype == BYTES else pack_elements(path, datatype, elements, is_finite=False)
    return tensor_of_elements(path, message.name, datatype, shape, len(elements), data)


def infer_response(call: InferCall, outputs: Sequence[Tensor], *, is_raw: bool) -> ModelInferResponse:
    """The response: raw where the request was, or where an output can be told in no other way.

    Raises:
        InternalError: an output is broken.
    """
    response = ModelInferResponse(model_name=call.model, model_version=VERSION, id=call.call_id)
    is_raw = is_raw or any(tensor.datatype not in _FIELDS for tensor in outputs)
    for tensor in outputs:
        check_output(tensor)
        output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if is_raw:
            response.raw_output_contents.append(tensor.data)
        else:
            output.contents.CopyFrom(_contents(tensor))
    return response


def _contents(tensor: Tensor) -> InferTensorContents:
    contents = InferTensorContents()
    elements: Sequence[object]
    if tensor.datatype == BYTES:
        elements = split_bytes(tensor.name, tensor.data)
    elif tensor.datatype == "BOOL":
        elements = unpack_elements(tensor.name, tensor.datatype, tensor.data)
    else:
        elements = unpack_numbers(tensor.datatype, tensor.data)
    getattr(contents, _FIELDS[tensor.datatype]).extend(elements)
    return contents
