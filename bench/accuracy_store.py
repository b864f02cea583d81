"""Keeps what `python -m bench.accuracy` found beside the peers, for as long as nothing that it depends on has changed.

Accuracy does not depend on what else the machine does: the same kernels on the same file give the same numbers. Called
by `engine`, so that a run need not wait for them again.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import LLAMA_REQUIREMENT, peers_folder

import naru_worker
from naru_worker.native.build import source_hash

_FOLDER = Path(__file__).resolve().parent
_MEASURED_BY = ("accuracy.py", "divergence.py", "llama_logits.py", "texts/accuracy.txt")
_COMPUTED_BY = ("adapters/ops", "adapters/weights")
"""What loads and runs a model beside the kernels."""


def measured(isa: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """The comparison for these arguments of `bench.accuracy`, kept or measured now; None where that failed."""
    file = peers_folder() / "accuracy" / f"{isa}-{_digest(isa, arguments)}.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "bench.accuracy", *arguments, "--isa", isa, "--output", str(file)]
        if subprocess.run(argv, check=False, cwd=_FOLDER.parent).returncode != 0:
            return None
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


def _digest(isa: str, arguments: Sequence[str]) -> str:
    """Of arguments, kernels, code, text and llama.cpp's version."""
    digest = hashlib.blake2b(" ".join([source_hash(isa), LLAMA_REQUIREMENT, *arguments]).encode(), digest_size=8)
    worker = Path(naru_worker.__file__).parent
    files = [_FOLDER / name for name in _MEASURED_BY]
    files += [file for folder in _COMPUTED_BY for file in sorted((worker / folder).rglob("*.py"))]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
