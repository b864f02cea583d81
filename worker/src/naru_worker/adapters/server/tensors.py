"""Tensors between messages and arrays, each checked against what the model takes. No I/O, no state.

Called by `tasks` for a task's inputs, and by `wire` for its outputs. Bytes of a message are not copied where they need
not be.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from naru_proto.errors import InternalError, InvalidRequest
from naru_proto.registry import TensorRecord
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.batch_request import BatchInput
from naru_worker.adapters.engine.batch_runner import Array
from naru_worker.adapters.engine.task_output import NamedArray

BYTES = "BYTES"
_NUMBERS = {
    "BOOL": "?",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_WORDS = {np.dtype(code): word for word, code in _NUMBERS.items()}
MAX_DIMS = 32
_LENGTH = struct.Struct("<I")


def read_tensors(
    task: worker_pb2.TensorTask,
    inputs: Sequence[TensorRecord],
    outputs: Sequence[TensorRecord],
    max_batch_size: int,
) -> BatchInput:
    """The inputs of one call as arrays. `max_batch_size` above 0: each has one more dimension, the first.

    Raises:
        InvalidRequest: a tensor is unknown, missing, of another type or shape, or its data has another size.
    """
    known = {record.name: record for record in inputs}
    given = {tensor.name: tensor for tensor in task.inputs}
    _check_names("inputs", given, known)
    _check_names("outputs", task.outputs, [record.name for record in outputs])
    missing = sorted(known.keys() - given.keys())
    if missing:
        raise InvalidRequest(f"input {missing[0]!r} is missing; the model takes {_listed(known)}", param="inputs")
    for name, tensor in given.items():
        _check_form(tensor, known[name], is_batched=max_batch_size > 0)
    rows = _rows(given, max_batch_size)
    arrays = {name: _array(given[name]) for name in known}
    shapes = tuple(tuple(given[name].shape[bool(max_batch_size) :]) for name in known)
    num_bytes = sum(len(tensor.data) for tensor in given.values())
    return BatchInput(arrays, rows, rows, (shapes, tuple(task.outputs)), num_bytes)


def datatype_of(each: NamedArray) -> str:
    """An array's type in the words of the Open Inference Protocol.

    Raises:
        InternalError: it has none.
    """
    dtype = each.values.dtype
    word = BYTES if dtype.kind == "O" else _WORDS.get(dtype.newbyteorder("<"))
    if word is None:
        raise InternalError(f"output {each.name!r} is of type {dtype}, which has no word in the protocol")
    return word


def fill_tensor(out: worker_pb2.Tensor, each: NamedArray) -> None:
    """Writes an array whose type has a word into the empty message `out`."""
    values = each.values
    out.name, out.datatype = each.name, datatype_of(each)
    out.shape.extend(values.shape)
    if out.datatype == BYTES:
        out.data = _joined(values.reshape(-1).tolist())
    else:
        out.data = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()


def _check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise InvalidRequest(f"the model has no {what[:-1]} {wrong[:80]!r}; it has {_listed(known)}", param=what)


def _check_form(tensor: worker_pb2.Tensor, record: TensorRecord, *, is_batched: bool) -> None:
    name, shape = record.name, tuple(tensor.shape)
    if tensor.datatype != record.datatype:
        raise InvalidRequest(
            f"input {name!r} is of datatype {tensor.datatype[:32]!r}; the model takes {record.datatype}", param="inputs"
        )
    wanted = (-1, *record.shape) if is_batched else record.shape
    fits = len(shape) == len(wanted) and all(
        size >= 0 and want in (-1, size) for size, want in zip(shape, wanted, strict=True)
    )
    if not fits:
        shown = list(shape[:MAX_DIMS])
        raise InvalidRequest(
            f"input {name!r} has shape {shown}; the model takes {list(wanted)}, where -1 is any", param="inputs"
        )
    if tensor.datatype == BYTES:
        return  # its size is seen when it is read
    expected = math.prod(shape) * np.dtype(_NUMBERS[tensor.datatype]).itemsize
    if len(tensor.data) != expected:
        raise InvalidRequest(
            f"input {name!r} has {len(tensor.data)} bytes of data; shape {list(shape)} of {tensor.datatype} has "
            f"{expected}",
            param="inputs",
        )


def _rows(given: dict[str, worker_pb2.Tensor], max_batch_size: int) -> int:
    if not max_batch_size:
        return 1
    sizes = {name: tensor.shape[0] for name, tensor in given.items()}
    rows = next(iter(sizes.values()))
    other = next((name for name, size in sizes.items() if size != rows), None)
    if other is not None:
        raise InvalidRequest(
            f"input {other!r} has {sizes[other]} rows and {next(iter(sizes))!r} has {rows}; the first dimension of all "
            "must be equal",
            param="inputs",
        )
    if not 1 <= rows <= max_batch_size:
        raise InvalidRequest(f"the inputs have {rows} rows; the model takes 1 to {max_batch_size}", param="inputs")
    return rows


def _array(tensor: worker_pb2.Tensor) -> Array:
    shape = tuple(tensor.shape)
    if tensor.datatype == BYTES:
        return _texts(tensor, math.prod(shape)).reshape(shape)
    if tensor.datatype == "BOOL":
        # Whatever is not 0 is true; other bytes would be no bool.
        raw: Array = np.frombuffer(tensor.data, np.uint8) != 0
    else:
        raw = np.frombuffer(tensor.data, _NUMBERS[tensor.datatype])
    return raw.reshape(shape)


def _texts(tensor: worker_pb2.Tensor, count: int) -> Array:
    data, place = tensor.data, 0
    found: list[str] = []
    # Each takes four bytes at least: a shape alone makes no work.
    if count * _LENGTH.size > len(data):
        raise _bad_bytes(tensor, f"holds fewer than the {count} elements of its shape")
    while place < len(data) and len(found) < count:
        if place + _LENGTH.size > len(data):
            raise _bad_bytes(tensor, f"ends within the length of element {len(found)}")
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        if place + length > len(data):
            raise _bad_bytes(tensor, f"ends within element {len(found)}, which has {length} bytes")
        try:
            found.append(data[place : place + length].decode())
        except UnicodeDecodeError as exc:
            raise _bad_bytes(tensor, f"has element {len(found)} that is not UTF-8") from exc
        place += length
    if len(found) != count or place != len(data):
        raise _bad_bytes(tensor, f"has {len(found)} elements in {place} of {len(data)} bytes, and its shape {count}")
    out = np.empty(count, object)
    out[:] = found
    return out


def _bad_bytes(tensor: worker_pb2.Tensor, why: str) -> InvalidRequest:
    return InvalidRequest(f"input {tensor.name[:80]!r}: its data {why}", param="inputs")


def _joined(elements: list[Any]) -> bytes:
    parts = []
    for element in elements:
        raw = element if isinstance(element, bytes) else str(element).encode("utf-8", "replace")
        parts += [_LENGTH.pack(len(raw)), raw]
    return b"".join(parts)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(map(repr, shown[:16])) + (" ..." if len(shown) > 16 else "")
