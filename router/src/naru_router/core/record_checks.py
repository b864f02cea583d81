"""Whether what stands in the route map can be what it says: types by each record's own fields, then the ranges.

Asked by the registry reader, since anybody who reaches Redis may have written there. A bad record is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from naru_proto.registry import (
    INFO_DIGEST_BYTES,
    FootprintRecord,
    KnownRecord,
    ModelInfoRecord,
    ModelRecord,
    ResidentRecord,
    TensorRecord,
    WorkerRecord,
)

MAX_WAIT_S = 86_400.0
"""No model's requests wait longer."""
MAX_NUMBER = 1 << 53
"""Above it JSON's readers disagree on what a number is; no amount of ours comes near."""
MAX_MODEL_LEN = (1 << 31) - 1
"""Of the wire's messages."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_NUMBER <= value <= MAX_NUMBER


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_text(value: object) -> bool:
    """Half of a surrogate pair, which JSON may hold, can be neither sent nor hashed."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_split(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_text(name) and _is_whole(weight) for name, weight in value)


_IS_OF: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "bool": lambda value: isinstance(value, bool),
    "int": _is_whole,
    "float": _is_number,
    "tuple[str, ...]": lambda value: isinstance(value, tuple) and all(map(_is_text, value)),
    "tuple[tuple[str, int], ...]": _is_split,
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(_is_whole, value)),
    "tuple[TensorRecord, ...]": lambda value: isinstance(value, tuple) and all(map(has_own_types, value)),
    "dict[str, str]": lambda value: (
        isinstance(value, dict) and all(_is_text(each) for pair in value.items() for each in pair)
    ),
    "dict[str, ResidentRecord]": lambda value: (
        isinstance(value, dict) and all(_is_text(name) and has_own_types(each) for name, each in value.items())
    ),
}


_IS_OF_AMOUNTS: Mapping[str, Callable[[Any], bool]] = {**_IS_OF, "int": _is_count, "float": _is_amount}


_Checks = tuple[tuple[str, Callable[[Any], bool]], ...]


def _checks(kind: type[Any], table: Mapping[str, Callable[[Any], bool]]) -> _Checks:
    return tuple((field.name, table[str(field.type)]) for field in dataclasses.fields(kind))


_CHECKS: Mapping[type[Any], _Checks] = {
    ModelRecord: _checks(ModelRecord, _IS_OF),
    ModelInfoRecord: _checks(ModelInfoRecord, _IS_OF),
    TensorRecord: _checks(TensorRecord, _IS_OF),
    # None of these has a number that may be below 0.
    WorkerRecord: _checks(WorkerRecord, _IS_OF_AMOUNTS),
    ResidentRecord: _checks(ResidentRecord, _IS_OF_AMOUNTS),
    KnownRecord: _checks(KnownRecord, _IS_OF_AMOUNTS),
    FootprintRecord: _checks(FootprintRecord, _IS_OF_AMOUNTS),
}


def has_own_types(record: Any) -> bool:
    """Whether each field of a record holds what it is declared to."""
    return all(is_of(getattr(record, name)) for name, is_of in _CHECKS[type(record)])


def is_model(name: str, record: ModelRecord) -> bool:
    """Whether the entry under a name is a model of that name."""
    if record.name != name or not has_own_types(record):
        return False
    is_wait_sane = 0 <= record.max_wait_s <= MAX_WAIT_S and record.max_depth >= 0
    is_scale_sane = min(record.min_replicas, record.max_replicas, record.max_retries) >= 0 < record.target_in_flight
    are_weights_sane = all(weight >= 0 for _, weight in record.split)
    is_factor_sane = record.load_factor == 0 or 1 <= record.load_factor <= 1000
    return is_wait_sane and is_scale_sane and are_weights_sane and is_factor_sane


def is_worker(worker_id: str, record: WorkerRecord) -> bool:
    """Whether the lease under an id is that worker's."""
    is_its_own = bool(worker_id) and record.worker_id == worker_id
    return is_its_own and has_own_types(record) and _is_address(record.address)


def is_info(record: ModelInfoRecord) -> bool:
    """Whether the facts can be a model's; one of tensors has neither a context nor a vocabulary."""
    if not has_own_types(record) or not record.tasks:
        return False
    if "tensors" in record.tasks:
        return record.max_model_len == record.vocab_size == 0
    return 0 < record.max_model_len <= MAX_MODEL_LEN and record.vocab_size > 0


def has_digest(data: bytes, digest: str) -> bool:
    """Whether a model's facts, as they were written, are those that stand under this digest."""
    return hashlib.blake2b(data, digest_size=INFO_DIGEST_BYTES).hexdigest() == digest


def is_known(model: str, record: KnownRecord) -> bool:
    """Whether it can be what a worker has of a model."""
    return has_own_types(record)


def is_footprint(model: str, record: FootprintRecord) -> bool:
    """Whether a copy can take so much."""
    return has_own_types(record)


def _is_address(text: str) -> bool:
    """host:port; an address that cannot be one would be tried again and again."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535
