"""Launches taken down instead of done, in a process where kernels are not for the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.launches import recorded_launches  # noqa: E402

SCRIPT = """
import json, torch
from naru_worker.adapters.ops.cuda.kernels import copy_blocks as module
from naru_worker.adapters.ops.cuda.launches import recorded_launches, same_code

found = {}
pairs = torch.tensor([[1, 2]], dtype=torch.int32)
for arch in (80, 90):
    blocks = torch.arange(4 * 64, dtype=torch.int32).reshape(4, 64)
    with recorded_launches(arch) as cases:
        module.copy_blocks(blocks, pairs)
        module.copy_blocks(torch.zeros(9, 640, dtype=torch.int32), pairs)
        module.copy_blocks(torch.zeros(9, 65, dtype=torch.int32), pairs)
    declared = list(module.compile_cases(arch))
    found[arch] = {
        "names": [case.name for case in cases],
        "archs": [case.arch for case in cases],
        "aligned": [case.aligned for case in cases],
        "declared": [any(same_code(case, other) for other in declared) for case in cases],
        "untouched": bool((blocks == torch.arange(4 * 64).reshape(4, 64)).all()),
    }
print(json.dumps(found))
"""


def test_a_launch_is_taken_down_once_for_each_code_that_it_needs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment))
    for arch in (80, 90):
        # Whether a row is whole 16 words decides about the code; how many blocks there are does not.
        assert found[str(arch)] == {
            "names": ["_copy_kernel#0", "_copy_kernel#1"],
            "archs": [arch, arch],
            "aligned": [["blocks", "pairs", "block_words"], ["blocks", "pairs"]],
            "declared": [True, False],
            "untouched": True,
        }


def test_the_interpreter_specialises_nothing() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"), recorded_launches(90):
        pass
