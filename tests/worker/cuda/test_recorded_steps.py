"""Whole steps of the backend as they would be launched on GPUs that aren't here: nothing is compiled while serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = Path(__file__).parents[1] / "support" / "recorded_steps.py"
MODELS = {
    "bf16",
    "q4_k, cache of bytes",
    "windows, half a head rotated",
    "learned positions, biases",
    "experts, norms of heads",
    "quantized experts, one shared",
    "8-bit floats",
    "8-bit floats behind activations",
    "groups of 64 and 128",
}


def report(arch: int, *arguments: str) -> dict[str, Any]:
    # A process of its own: in this one kernels run under the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found: dict[str, Any] = json.loads(
        subprocess.check_output([sys.executable, str(PROGRAM), str(arch), *arguments], env=environment)
    )
    assert found.keys() == MODELS and all(model["first"] >= 6 for model in found.values())
    return found


@pytest.mark.timeout(600)
def test_steps_of_any_size_need_no_other_code_than_those_of_a_warm_up() -> None:
    """Compiling one takes seconds, for which every stream on the GPU would wait."""
    assert [code for model in report(90).values() for code in model["later"]] == []


@pytest.mark.gpu_offline
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", [80, 89, 90])
def test_what_steps_launch_compiles_for_each_gpu_within_its_limits(arch: int) -> None:
    assert [fault for model in report(arch, "--compile").values() for fault in model["faults"]] == []
