"""What requests to an ONNX model look like: its tensors as clients are told them, and how many rows may share a call.

Joins what the file says with what its config.pbtxt and the load ask for. Pure; called when a model is prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_proto.registry import TensorRecord
from naru_worker.adapters.onnx.probing import OnnxFacts
from naru_worker.adapters.onnx.triton_config import TritonConfig


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """As told to clients."""

    inputs: tuple[TensorRecord, ...]
    """Without the dimension of rows, where there is one."""
    outputs: tuple[TensorRecord, ...]
    max_batch_size: int
    """0: there is no dimension of rows, and every request is computed by itself."""
    preferred_rows: tuple[int, ...] = ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """What is given where a request names no output."""
        return tuple(record.name for record in self.outputs)


def plan_tensors(
    path: Path, facts: OnnxFacts, config: TritonConfig | None, wished_rows: int | None, most_rows: int
) -> TensorPlan:
    """The plan of one model. `wished_rows`: of its load; `most_rows`: the worker's own limit where nobody names one.

    Raises:
        LoadError: config and file contradict each other.
    """
    if config is None:
        rows = (wished_rows or most_rows) if facts.has_rows else 0
        return TensorPlan(_without_rows(facts.inputs, rows), _without_rows(facts.outputs, rows), rows)
    rows = config.max_batch_size and min(config.max_batch_size, wished_rows or config.max_batch_size)
    if rows and not facts.has_rows:
        # Its tensors may still agree where the file only fails to name them alike.
        _check_open_rows(path, (*facts.inputs, *facts.outputs))
    inputs = _joined(path, "input", _without_rows(facts.inputs, rows), config.inputs)
    outputs = _joined(path, "output", _without_rows(facts.outputs, rows), config.outputs)
    missing = sorted({each.name for each in facts.inputs} - {each.name for each in inputs})
    if missing:
        raise LoadError(f"{path}: takes input {missing[0]!r}, which its config.pbtxt does not name", param="input")
    return TensorPlan(inputs, outputs, rows, tuple(size for size in config.preferred_rows if size <= rows))


def _without_rows(records: Sequence[TensorRecord], rows: int) -> tuple[TensorRecord, ...]:
    return tuple(TensorRecord(each.name, each.datatype, each.shape[1 if rows else 0 :]) for each in records)


def _check_open_rows(path: Path, records: Sequence[TensorRecord]) -> None:
    fixed = next((each for each in records if not each.shape or each.shape[0] != -1), None)
    if fixed is not None:
        raise LoadError(
            f"{path}: {fixed.name!r} has shape {list(fixed.shape)}, whose first dimension is not open, and "
            "max_batch_size is above 0; set it to 0, or export the model with an open first dimension",
            param="max_batch_size",
        )


def _joined(
    path: Path, field: str, own: Sequence[TensorRecord], told: Sequence[TensorRecord]
) -> tuple[TensorRecord, ...]:
    """Those of the config, each of which the file must have; the file's own where the config names none."""
    if not told:
        return tuple(own)
    known = {each.name: each for each in own}
    for each in told:
        mine = known.get(each.name)
        if mine is None:
            raise LoadError(f"{path}: has no {field} {each.name!r}; it has {', '.join(sorted(known))}", param=field)
        if mine.datatype != each.datatype:
            raise LoadError(f"{path}: {field} {each.name!r} is {mine.datatype}, not {each.datatype}", param="data_type")
        fits = len(mine.shape) == len(each.shape) and all(
            -1 in pair or pair[0] == pair[1] for pair in zip(mine.shape, each.shape, strict=True)
        )
        if not fits:
            raise LoadError(
                f"{path}: {field} {each.name!r} has dims {list(mine.shape)}, and its config.pbtxt says "
                f"{list(each.shape)}",
                param="dims",
            )
    return tuple(told)
