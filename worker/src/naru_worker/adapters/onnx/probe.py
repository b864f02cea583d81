"""Loads an ONNX model in a process of its own and tells what it takes: memory, and its tensors.

Run as ``python -m naru_worker.adapters.onnx.probe FILE THREADS ROWS`` by `probing`: a file that makes the library crash
ends this process and not the worker, and memory is measured where nothing else moves. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from naru_proto.errors import NaruError
from naru_proto.registry import TensorRecord
from naru_worker.adapters.engine.batch_runner import Array
from naru_worker.adapters.machine import peak_rss_bytes, rss_bytes
from naru_worker.adapters.onnx.session import OnnxRunner, import_runtime

_TYPES = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8", "BYTES": "O"}
_IDENTITY = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a02080162"
    "0f0a0179120a0a08080112040a02080142040a00100d"
)
"""A model of one number: y = x. Run first, it brings what the library itself takes, once, into memory."""
MAX_TRIAL_ELEMENTS = 1 << 26
"""Larger inputs are not tried."""


def main(arguments: list[str]) -> int:
    """Prints the facts, or the error; returns the exit code."""
    path, num_threads, rows = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    try:
        print(json.dumps(_facts(path, num_threads, rows)))
    except NaruError as error:
        print(json.dumps({"error": error.message, "param": error.param}))
        return 1
    return 0


def _facts(path: Path, num_threads: int, rows: int) -> dict[str, object]:
    session = import_runtime().InferenceSession(_IDENTITY, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.float32)})
    before_bytes = rss_bytes()
    runner = OnnxRunner(path, num_threads)
    loaded_bytes = rss_bytes()
    _try(runner, rows)
    return {
        "inputs": [_plain(record) for record in runner.inputs],
        "outputs": [_plain(record) for record in runner.outputs],
        "has_rows": runner.has_rows,
        "weight_bytes": max(0, loaded_bytes - before_bytes),
        "workspace_bytes": max(0, peak_rss_bytes() - loaded_bytes),
    }


def _try(runner: OnnxRunner, rows: int) -> None:
    """One call of zeros; what the model says to it does not matter, what it takes does."""
    inputs: dict[str, Array] = {}
    for record in runner.inputs:
        shape = [1 if size < 0 else size for size in record.shape]
        if runner.has_rows:
            shape[0] = rows
        if np.prod(shape, dtype=np.float64) > MAX_TRIAL_ELEMENTS:
            return
        array = np.zeros(shape, _TYPES.get(record.datatype) or record.datatype.lower())
        if record.datatype == "BYTES":
            array[...] = ""
        inputs[record.name] = array
    try:
        runner.infer(inputs, ())
    except NaruError:
        return


def _plain(record: TensorRecord) -> dict[str, object]:
    return {"name": record.name, "datatype": record.datatype, "shape": list(record.shape)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
