"""Tensors as they come with a request: shapes, data in JSON, and whether they are what a model takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from naru_proto.errors import InvalidRequest
from naru_proto.registry import ModelInfoRecord, TensorRecord
from naru_proto.v1.worker_pb2 import Tensor
from naru_router.core.fields import check_integer, shown
from naru_router.core.oip.datatypes import check_data, pack_elements

MAX_RANK = 16
MAX_DIM = 2**63 - 1


def check_shape(path: str, value: object) -> tuple[int, ...]:
    """The value as a shape whose sizes are all known.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise InvalidRequest(f"{path} is {shown(value)}; it must be an array of at most {MAX_RANK} sizes", param=path)
    return tuple(check_integer(path, size, 0, MAX_DIM) for size in value)


def flatten(path: str, value: object) -> list[object]:
    """The elements of data that may be nested as its shape is.

    Raises:
        InvalidRequest: no array, or arrays of unequal lengths, or arrays beside elements.
    """
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} is {shown(value)}; it must be an array", param=path)
    depth = 1
    while value and isinstance(value[0], list):
        depth += 1
        length = len(value[0])
        if depth > MAX_RANK or not all(isinstance(each, list) and len(each) == length for each in value):
            message = f"{path} is nested unevenly, or deeper than {MAX_RANK}; send the elements in one array"
            raise InvalidRequest(message, param=path)
        value = list(itertools.chain.from_iterable(value))
    return value


def tensor_of_json(path: str, name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """A tensor whose data came as JSON.

    Raises:
        InvalidRequest: the data is not of the datatype, or not as much as the shape says.
    """
    elements = flatten(path, data)
    return tensor_of_elements(path, name, datatype, shape, len(elements), pack_elements(path, datatype, elements))


def tensor_of_elements(
    path: str, name: str, datatype: str, shape: tuple[int, ...], num_elements: int, data: bytes
) -> Tensor:
    """A tensor of so many elements, packed.

    Raises:
        InvalidRequest: not as many as the shape says.
    """
    wanted = math.prod(shape)
    if num_elements != wanted:
        message = f"{path} has {num_elements} elements; the shape {list(shape)} says {wanted}"
        raise InvalidRequest(message, param=path)
    return Tensor(name=name, datatype=datatype, shape=shape, data=data)


def check_raw(path: str, tensor: Tensor) -> None:
    """Checks the data of a tensor that came as bytes.

    Raises:
        InvalidRequest: it is not what shape and datatype say.
    """
    check_data(path, tensor.datatype, math.prod(tensor.shape), tensor.data)


def check_inputs(inputs: Sequence[Tensor], info: ModelInfoRecord) -> None:
    """Checks the inputs of a model of tensors against what it takes.

    Raises:
        InvalidRequest: one is missing, unknown, or of another datatype or shape.
    """
    known = {record.name: record for record in info.inputs}
    for tensor in inputs:
        record = known.pop(tensor.name, None)
        if record is None:
            names = ", ".join(record.name for record in info.inputs)
            message = f"the input {tensor.name[:100]!r} is unknown or stands twice; the model takes {names}"
            raise InvalidRequest(message, param="inputs")
        _check_input(tensor, record, info.max_batch_size)
    if known:
        raise InvalidRequest(f"the input {next(iter(known))!r} is missing; the model needs it", param="inputs")
    if info.max_batch_size and len({tensor.shape[0] for tensor in inputs}) > 1:
        sizes = ", ".join(f"{tensor.name}: {tensor.shape[0]}" for tensor in inputs)
        raise InvalidRequest(
            f"the inputs are of unequal batches ({sizes}); make the first dimensions equal", param="inputs"
        )


def _check_input(tensor: Tensor, record: TensorRecord, max_batch_size: int) -> None:
    path = f"inputs.{record.name}"
    if tensor.datatype != record.datatype:
        message = f"{path} is of {tensor.datatype}; the model takes {record.datatype}"
        raise InvalidRequest(message, param=path)
    shape, wanted = tuple(tensor.shape), full_shape(record, max_batch_size)
    fits = len(shape) == len(wanted) and all(want in (-1, size) for size, want in zip(shape, wanted, strict=True))
    if not fits:
        raise InvalidRequest(f"{path} has the shape {list(shape)}; the model takes {list(wanted)}", param=path)
    if max_batch_size and not 1 <= shape[0] <= max_batch_size:
        message = f"{path} is a batch of {shape[0]}; the model takes 1 to {max_batch_size} at once"
        raise InvalidRequest(message, param=path)


def check_outputs(names: Sequence[str], known: Sequence[str]) -> None:
    """Checks the names of outputs that were asked for.

    Raises:
        InvalidRequest: one is unknown, or stands twice.
    """
    for name in names:
        if name not in known:
            message = f"the output {name[:100]!r} is unknown; the model gives {', '.join(known)}"
            raise InvalidRequest(message, param="outputs")
    if len(set(names)) != len(names):
        raise InvalidRequest("an output is asked for twice; name each once", param="outputs")


def full_shape(record: TensorRecord, max_batch_size: int) -> tuple[int, ...]:
    """With the batch, where the model takes batches; -1: any size."""
    return (-1, *record.shape) if max_batch_size else record.shape
