"""Tensors of the Open Inference Protocol: what goes in comes out, and bytes that lie are refused, never believed."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InternalError, InvalidRequest
from naru_proto.registry import ModelInfoRecord, TensorRecord
from naru_proto.v1.open_inference_pb2 import ModelInferRequest
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.oip.calls import MAX_INPUT_BYTES
from naru_router.core.oip.datatypes import (
    BYTES,
    NAMES,
    SIZES,
    check_data,
    pack_bytes,
    pack_elements,
    split_bytes,
    unpack_elements,
)
from naru_router.core.oip.grpc_call import infer_response, parse_infer_message
from naru_router.core.oip.json_call import header_length, parse_infer
from naru_router.core.oip.json_reply import infer_reply
from naru_router.core.oip.tensors import check_inputs, flatten

INTEGERS = {
    name: (-(2 ** (8 * size - 1)) if name.startswith("I") else 0, 2 ** (8 * size - name.startswith("I")) - 1)
    for name, size in SIZES.items()
    if "INT" in name
}
FLOAT_BITS: dict[str, Any] = {"FP16": 16, "FP32": 32, "FP64": 64}
JSON_TYPES = [name for name in NAMES if name != "BF16"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def elements(datatype: str) -> st.SearchStrategy[Any]:
    if datatype in INTEGERS:
        return st.integers(*INTEGERS[datatype])
    if datatype in FLOAT_BITS:
        return st.floats(width=FLOAT_BITS[datatype], allow_nan=False, allow_infinity=False)
    return st.booleans() if datatype == "BOOL" else TEXTS


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, list[int], list[Any]]:
    """Datatype, shape and elements in a row."""
    datatype = draw(st.sampled_from(JSON_TYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    return datatype, shape, draw(st.lists(elements(datatype), min_size=count, max_size=count))


def nested(shape: list[int], values: list[Any]) -> Any:
    if len(shape) <= 1:
        return values
    size = math.prod(shape[1:])
    return [nested(shape[1:], values[at * size : (at + 1) * size]) for at in range(shape[0])]


@given(tensors())
def test_elements_come_out_as_they_went_in(tensor: tuple[str, list[int], list[Any]]) -> None:
    datatype, shape, values = tensor
    data = pack_elements("x", datatype, values)
    check_data("x", datatype, math.prod(shape), data)
    assert unpack_elements("x", datatype, data) == values


@given(tensors(), st.booleans(), st.booleans())
def test_json_and_binary_requests_say_the_same_and_replies_come_back(
    tensor: tuple[str, list[int], list[Any]], is_nested: bool, is_binary: bool
) -> None:
    datatype, shape, values = tensor
    head: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": shape}
    plain = {**head, "data": nested(shape, values) if is_nested and 0 not in shape else values}
    data = pack_elements("x", datatype, values)
    binary = {**head, "parameters": {"binary_data_size": len(data)}}
    parameters = {"binary_data_output": is_binary}
    first = parse_infer({"inputs": [plain], "parameters": parameters}, b"", "m", "")
    second = parse_infer({"inputs": [binary], "parameters": parameters}, data, "m", "")
    assert first.call.inputs == second.call.inputs
    body, length = infer_reply(first, first.call.inputs)
    assert bool(length) == is_binary
    (output,) = json.loads(body[:length] if is_binary else body)["outputs"]
    assert output["shape"] == shape
    if is_binary:
        assert body[length:] == data and output["parameters"] == {"binary_data_size": len(data)}
    else:
        assert output["data"] == values


@given(tensors(), st.booleans())
def test_messages_carry_tensors_typed_and_raw(tensor: tuple[str, list[int], list[Any]], is_raw: bool) -> None:
    datatype, shape, values = tensor
    data = pack_elements("x", datatype, values)
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)
    call = parse_infer_message(request)
    assert call.inputs == (Tensor(name="x", datatype=datatype, shape=shape, data=data),)
    response = infer_response(call, call.inputs, is_raw=is_raw)
    if is_raw or datatype == "FP16":
        assert list(response.raw_output_contents) == [data]
        return
    again = ModelInferRequest(model_name="m")
    again.inputs.add(name="x", datatype=datatype, shape=shape, contents=response.outputs[0].contents)
    assert parse_infer_message(again).inputs == call.inputs


@given(st.sampled_from(NAMES), st.integers(0, 2**70), st.binary(max_size=40))
def test_any_bytes_are_checked_and_never_crash(datatype: str, count: int, data: bytes) -> None:
    try:
        check_data("x", datatype, count, data)
    except InvalidRequest as exc:
        assert exc.param == "x"
    else:
        assert len(unpack_elements_or_bytes(datatype, data)) == count


def unpack_elements_or_bytes(datatype: str, data: bytes) -> list[Any]:
    return split_bytes("x", data) if datatype == BYTES else unpack_elements("x", datatype, data)


FIELDS = ["name", "datatype", "shape", "data", "parameters", "binary_data_size", "inputs", "outputs", "id", "timeout"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from([*NAMES, "x", "y", "-1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.binary(max_size=10))
def test_any_json_is_read_or_refused(body: dict[str, Any], binary: bytes) -> None:
    try:
        parse_infer(body, binary, "m", "")
    except InvalidRequest as exc:
        assert exc.message


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_elements_of_bytes_are_split_where_they_were_joined(values: list[bytes]) -> None:
    assert split_bytes("x", pack_bytes(values)) == values


def test_numbers_that_json_may_not_carry() -> None:
    halves = struct.pack("<3e", 1.5, float("inf"), float("nan"))
    asked = parse_infer({"inputs": [{"name": "x", "datatype": "FP32", "shape": [0], "data": []}]}, b"", "m", "")
    body, _ = infer_reply(asked, [Tensor(name="y", datatype="FP16", shape=[3], data=halves)])
    assert json.loads(body)["outputs"][0]["data"] == [1.5, None, None]
    for shape, datatype, data in (([2], "FP16", halves), ([1], "FP99", b"xx"), ([1], BYTES, b"xx"), ([2], BYTES, b"")):
        with pytest.raises(InternalError):
            infer_reply(asked, [Tensor(name="y", datatype=datatype, shape=shape, data=data)])
    brains = struct.pack("<f", 1.5)[2:] + struct.pack("<f", -2.0)[2:]
    assert unpack_elements("y", "BF16", brains) == [1.5, -2.0]
    too_large: list[tuple[str, Any]] = [("INT8", 128), ("UINT8", -1), ("INT64", 2**63)]
    too_large += [("FP16", 1e6), ("FP32", 1e39), ("FP64", 10**400)]
    of_another_kind: list[tuple[str, Any]] = [("INT8", 1.0), ("INT8", True), ("FP32", "1"), ("BOOL", 1), (BYTES, 1)]
    for datatype, value in (*too_large, *of_another_kind, (BYTES, "\ud800")):
        with pytest.raises(InvalidRequest):
            pack_elements("x", datatype, [value])


def test_inputs_that_mean_more_than_a_worker_takes_are_refused() -> None:
    zeros = [0] * (MAX_INPUT_BYTES // 8 + 1)
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(zeros)], "data": zeros}
    with pytest.raises(InvalidRequest, match="smaller batches"):
        parse_infer({"inputs": [tensor]}, b"", "m", "")
    message = ModelInferRequest()
    contents = message.inputs.add(name="x", datatype="INT64", shape=[len(zeros)]).contents
    contents.int64_contents.extend(zeros)
    with pytest.raises(InvalidRequest, match="smaller batches"):
        parse_infer_message(message)


@pytest.mark.parametrize("text", ["0", "-1", "11", "1e1", "", "0x1", "9" * 30, "1.0"])
def test_a_header_length_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        header_length(text, 10)


def test_deep_nesting_is_refused_cheaply() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest):
        flatten("x", deep)


def test_shapes_are_checked_with_and_without_batches() -> None:
    def info(max_batch_size: int) -> ModelInfoRecord:
        inputs = (TensorRecord("a", "FP32", (-1, 2)), TensorRecord("b", "INT8", ()))
        return ModelInfoRecord("onnx", 0, 0, "", "", "", ("tensors",), inputs=inputs, max_batch_size=max_batch_size)

    def call(first: list[int], second: list[int]) -> list[Tensor]:
        return [Tensor(name="a", datatype="FP32", shape=first), Tensor(name="b", datatype="INT8", shape=second)]

    check_inputs(call([7, 2], []), info(0))
    check_inputs(call([3, 7, 2], [3]), info(4))
    for first, second, size in (
        ([7, 3], [], 0),
        ([7], [], 0),
        ([7, 2], [1], 0),
        ([5, 7, 2], [5], 4),
        ([0, 7, 2], [0], 4),
        ([3, 7, 2], [2], 4),
        ([7, 2], [], 4),
    ):
        with pytest.raises(InvalidRequest):
            check_inputs(call(first, second), info(size))


CONTENTS = ["bool_contents", "int_contents", "uint64_contents", "fp32_contents", "bytes_contents"]
INPUTS = st.tuples(
    st.sampled_from([*NAMES, "", "x"]),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=4),
    st.sampled_from(CONTENTS),
    st.integers(0, 4),
)


@given(st.lists(INPUTS, max_size=3), st.lists(st.binary(max_size=9), max_size=3))
def test_any_message_is_read_or_refused(inputs: list[Any], raw: list[bytes]) -> None:
    request = ModelInferRequest(model_name="m", raw_input_contents=raw)
    for datatype, shape, field, count in inputs:
        contents = request.inputs.add(name="x", datatype=datatype, shape=shape).contents
        getattr(contents, field).extend([b"a" if field == "bytes_contents" else 1] * count)
    try:
        call = parse_infer_message(request)
    except InvalidRequest as exc:
        assert exc.message
    else:
        infer_response(call, call.inputs, is_raw=bool(raw))
