"""One loaded ONNX model: a `TensorRunner` over an onnxruntime session. The library is imported with the first of them.

Made by a loading thread, called by the engine thread. No library of custom operators is ever registered.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from naru_proto.errors import InvalidRequest, LoadError, Overloaded
from naru_proto.registry import TensorRecord
from naru_worker.adapters.engine.batch_runner import Array

DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
_MAX_WORDS = 400
"""Characters of the library's own words in an error."""


class OnnxRunner:
    """Shapes are as the file has them: with the dimension of rows, where there is one."""

    def __init__(self, path: Path, num_threads: int, weight_bytes: int = 0) -> None:
        """Reads the file; takes seconds for large ones.

        Raises:
            LoadError: the library is missing, or refuses the file.
        """
        runtime = import_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # Threads that wait must not burn the cores that other models compute on.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # What a run took goes back when it is over: memory is booked for weights and for one run at a time.
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 4
        try:
            self._session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as exc:
            # The library's errors share no class with a name of its own.
            raise LoadError(f"{path}: onnxruntime refuses it: {_words(exc)}", param="onnx") from exc
        self.weight_bytes = weight_bytes
        self.inputs = tuple(_record(path, node) for node in self._session.get_inputs())
        self.outputs = tuple(_record(path, node) for node in self._session.get_outputs() if node.type in DATATYPES)
        self.has_rows = _has_rows([*self._session.get_inputs(), *self._session.get_outputs()])
        """Whether the first dimension of all tensors is one and the same, and open."""
        if not self.outputs:
            raise LoadError(f"{path}: none of its outputs is a tensor; export it without maps and sequences")

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """The outputs named, all of them where none is.

        Raises:
            InvalidRequest: what the model refuses, in its own words.
            Overloaded: there is no memory for it.
        """
        names = list(outputs) or [record.name for record in self.outputs]
        try:
            found = self._session.run(names, dict(inputs))
        except Exception as exc:
            # The library says by the same classes that an input is out of range and that it has a fault.
            words = _words(exc)
            if isinstance(exc, MemoryError) or "alloc" in words:
                raise Overloaded(f"there is no memory for this call ({words}); send less at once") from exc
            raise InvalidRequest(f"the model refuses the inputs: {words}", param="inputs") from exc
        return dict(zip(names, found, strict=True))

    def close(self) -> None:
        """Gives back all memory; the runner is of no use any more."""
        self._session = None


def import_runtime() -> Any:
    """The library.

    Raises:
        LoadError: it is not installed.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as exc:
        raise LoadError(
            f"ONNX models need onnxruntime, which is not here ({exc}); install naru[onnx]", param="onnxruntime"
        ) from exc


def _record(path: Path, node: Any) -> TensorRecord:
    if node.type not in DATATYPES:
        raise LoadError(f"{path}: {node.name!r} is of type {node.type}, which no request can carry")
    return TensorRecord(node.name, DATATYPES[node.type], tuple(_size(size) for size in node.shape))


def _size(size: object) -> int:
    """Open dimensions come as names or nothing."""
    return size if isinstance(size, int) and size >= 0 else -1


def _has_rows(nodes: Sequence[Any]) -> bool:
    firsts = {node.shape[0] if node.shape else 0 for node in nodes if node.type in DATATYPES}
    return len(firsts) == 1 and not isinstance(next(iter(firsts)), int)


def _words(exc: Exception) -> str:
    """What the library says, without its prefix and its line breaks."""
    text = " ".join(str(exc).split())
    # Before them stand its name, a number, and the number's name.
    return text.split(" : ", 3)[-1][:_MAX_WORDS]
