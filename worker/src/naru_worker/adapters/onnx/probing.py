"""Asks the probe, in a process of its own, and believes what it says. Blocks; called when a model is prepared."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_proto.registry import TensorRecord

_LOOK_S = 0.02
_MAX_REPLY_BYTES = 1 << 22


class ProbeStopped(Exception):
    """It was told to stop; its process is gone."""


@dataclass(frozen=True, slots=True)
class OnnxFacts:
    """Of one .onnx file."""

    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    has_rows: bool
    """The first dimension of all tensors is one and the same, and open."""
    weight_bytes: int
    """Memory that the loaded model holds, measured."""
    workspace_bytes: int
    """Memory that loading or one call of zeros took beyond, measured."""


def probe(path: Path, num_threads: int, rows: int, should_stop: threading.Event) -> OnnxFacts:
    """The facts of a file, as its first load shows them. `rows`: of the call that is tried.

    Raises:
        LoadError: the library is missing, refuses the file or crashes over it.
        ProbeStopped: `should_stop` was set.
    """
    command = [sys.executable, "-m", "naru_worker.adapters.onnx.probe", str(path), str(num_threads), str(rows)]
    with (
        tempfile.TemporaryFile() as reply,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=reply, stderr=subprocess.DEVNULL, cwd="/"
        ) as process,
    ):
        try:
            while process.poll() is None:
                if should_stop.is_set():
                    raise ProbeStopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
        reply.seek(0)
        raw = reply.read(_MAX_REPLY_BYTES)
    try:
        said = json.loads(raw)
        if process.returncode == 0:
            return OnnxFacts(
                _records(said["inputs"]),
                _records(said["outputs"]),
                bool(said["has_rows"]),
                int(said["weight_bytes"]),
                int(said["workspace_bytes"]),
            )
        error, param = str(said["error"]), str(said["param"])
    except (ValueError, KeyError, TypeError):
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise LoadError(f"{path}: onnxruntime crashed over it ({how}); the file is damaged", param="onnx") from None
    raise LoadError(error, param=param)


def _records(said: list[dict[str, object]]) -> tuple[TensorRecord, ...]:
    return tuple(TensorRecord._from_dict(each) for each in said)
