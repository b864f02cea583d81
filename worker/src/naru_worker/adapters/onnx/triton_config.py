"""What a config.pbtxt of Triton says of a model: batches, tensors, version. Pure; called when a model is prepared.

Fields that do not change results are passed over, and named for the log; those that would are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from naru_proto.errors import LoadError
from naru_proto.registry import TensorRecord
from naru_worker.adapters.onnx.text_format import Message, Value, Word, parse_text_format

DATATYPES = {
    "TYPE_BOOL": "BOOL",
    "TYPE_INT8": "INT8",
    "TYPE_INT16": "INT16",
    "TYPE_INT32": "INT32",
    "TYPE_INT64": "INT64",
    "TYPE_UINT8": "UINT8",
    "TYPE_UINT16": "UINT16",
    "TYPE_UINT32": "UINT32",
    "TYPE_UINT64": "UINT64",
    "TYPE_FP16": "FP16",
    "TYPE_FP32": "FP32",
    "TYPE_FP64": "FP64",
    "TYPE_STRING": "BYTES",
}
MAX_BATCH_SIZE = 1 << 16
MAX_DELAY_US = 60_000_000
MAX_TENSORS = 1024
MAX_DIMS = 32
_PLATFORMS = ("", "onnxruntime_onnx")
_BACKENDS = ("", "onnxruntime")
_REFUSED = {
    "sequence_batching": "requests that belong together",
    "ensemble_scheduling": "ensembles",
    "batch_input": "inputs made from a batch",
    "batch_output": "outputs cut by another tensor",
    "model_operations": "libraries of operators",
    "cc_model_filenames": "a file for each GPU",
    "model_repository_agents": "agents",
}
_HONOURED = frozenset({
    "name", "platform", "backend", "max_batch_size", "input", "output", "dynamic_batching", "version_policy",
    "default_model_filename", "model_transaction_policy",
})  # fmt: skip
_TENSOR_FIELDS = frozenset({"name", "data_type", "dims"})
_TENSOR_REFUSED = ("reshape", "is_shape_tensor", "allow_ragged_batch", "optional", "is_non_linear_format_io")
_T = TypeVar("_T", str, int)


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the numbered folders may be served; the highest of them is."""

    only: tuple[int, ...] = ()
    """None: all."""


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """A checked config."""

    max_batch_size: int = 0
    inputs: tuple[TensorRecord, ...] = ()
    """None: as the model says."""
    outputs: tuple[TensorRecord, ...] = ()
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    versions: VersionPolicy = VersionPolicy()
    file_name: str = ""
    ignored: tuple[str, ...] = ()
    """Fields that were passed over."""


def parse_config(text: str, where: str) -> TritonConfig:
    """Reads a config.

    Raises:
        LoadError: it is broken, or asks for something that is not served; names the field.
    """
    fields = parse_text_format(text, where)
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise LoadError(f"{where}: {name} is set; {what} are not served", param=name)
    platform, backend = _one(fields, "platform", "", where), _one(fields, "backend", "", where)
    if platform not in _PLATFORMS or backend not in _BACKENDS:
        raise LoadError(
            f"{where}: platform is {platform[:64]!r} and backend {backend[:64]!r}; only onnxruntime is served",
            param="platform",
        )
    if _flag(_message(fields, "model_transaction_policy", where) or {}, "decoupled", where):
        raise LoadError(f"{where}: decoupled is set; one request gets one answer here", param="decoupled")
    delay_s, preferred = _batching(_message(fields, "dynamic_batching", where), where)
    return TritonConfig(
        max_batch_size=_within(_one(fields, "max_batch_size", 0, where), 0, MAX_BATCH_SIZE, "max_batch_size", where),
        inputs=_tensors(fields, "input", where),
        outputs=_tensors(fields, "output", where),
        max_delay_s=delay_s,
        preferred_rows=preferred,
        versions=_policy(_message(fields, "version_policy", where), where),
        file_name=_file_name(_one(fields, "default_model_filename", "", where), where),
        ignored=tuple(sorted(name for name in fields.keys() - _HONOURED - _REFUSED.keys())),
    )


def _batching(fields: Message | None, where: str) -> tuple[float, tuple[int, ...]]:
    if fields is None:
        return 0.0, ()
    delay_us = _one(fields, "max_queue_delay_microseconds", 0, where)
    _within(delay_us, 0, MAX_DELAY_US, "max_queue_delay_microseconds", where)
    sizes = [
        _within(_as(value, int, "preferred_batch_size", where), 1, MAX_BATCH_SIZE, "preferred_batch_size", where)
        for value in fields.get("preferred_batch_size", [])
    ]
    return delay_us / 1e6, tuple(sorted(set(sizes)))


def _policy(fields: Message | None, where: str) -> VersionPolicy:
    specific = _message(fields or {}, "specific", where)
    if specific is None:
        return VersionPolicy()
    only = tuple(_as(value, int, "versions", where) for value in specific.get("versions", []))
    if not only:
        raise LoadError(f"{where}: version_policy.specific names no version", param="version_policy")
    return VersionPolicy(only)


def _tensors(fields: Message, field: str, where: str) -> tuple[TensorRecord, ...]:
    values = fields.get(field, [])
    if len(values) > MAX_TENSORS:
        raise LoadError(f"{where}: has {len(values)} times {field}; at most {MAX_TENSORS} are allowed", param=field)
    found = tuple(_tensor(value, field, where) for value in values)
    names = [tensor.name for tensor in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise LoadError(f"{where}: {field} {twice!r} is there twice", param=field)
    return found


def _tensor(value: Value, field: str, where: str) -> TensorRecord:
    if not isinstance(value, dict):
        raise LoadError(f"{where}: {field} is {value!r}; it must be a message", param=field)
    name = _one(value, "name", "", where)
    if not name:
        raise LoadError(f"{where}: an {field} has no name", param=field)
    for refused in _TENSOR_REFUSED:
        if value.get(refused) and value[refused] != [Word("false")]:
            raise LoadError(f"{where}: {field} {name!r} sets {refused}, which is not served", param=refused)
    word = _one(value, "data_type", "", where)
    if word not in DATATYPES:
        raise LoadError(
            f"{where}: {field} {name!r} has data_type {word[:32]!r}; served are {', '.join(DATATYPES)}",
            param="data_type",
        )
    dims = tuple(_as(size, int, "dims", where) for size in value.get("dims", []))
    if len(dims) > MAX_DIMS or any(size != -1 and size < 1 for size in dims):
        raise LoadError(
            f"{where}: {field} {name!r} has dims {list(dims[:MAX_DIMS])}; each must be -1 or at least 1", param="dims"
        )
    return TensorRecord(name, DATATYPES[word], dims)


def _message(fields: Message, name: str, where: str) -> Message | None:
    values = fields.get(name, [])
    if not values:
        return None
    # Given twice, messages merge; nobody writes that by hand.
    if len(values) > 1 or not isinstance(values[0], dict):
        raise LoadError(f"{where}: {name} must be one message", param=name)
    return values[0]


def _one(fields: Message, name: str, default: _T, where: str) -> _T:
    """The last value of a field counts."""
    values = fields.get(name)
    return _as(values[-1], type(default), name, where) if values else default


def _as(value: Value, wanted: type[_T], name: str, where: str) -> _T:
    if not isinstance(value, wanted):
        raise LoadError(f"{where}: {name} is {str(value)[:64]!r}; a {wanted.__name__} is needed", param=name)
    return value


def _flag(fields: Message, name: str, where: str) -> bool:
    return _one(fields, name, "false", where).lower() in ("true", "t", "1")


def _within(value: int, low: int, high: int, name: str, where: str) -> int:
    if not low <= value <= high:
        raise LoadError(f"{where}: {name} is {value}; it must be in [{low}, {high}]", param=name)
    return value


def _file_name(name: str, where: str) -> str:
    if "/" in name or "\\" in name or name in (".", "..") or "\0" in name:
        raise LoadError(
            f"{where}: default_model_filename is {name[:64]!r}; it must be a plain file name",
            param="default_model_filename",
        )
    return name
