"""Fixtures of the native kernels' tests: one run per instruction set that this machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from naru_worker.native.isa import VARIANTS, cpu_flags, runnable

# Tests are no package: the modules beside this file are found by path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=list(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    """An instruction set; its library is compiled on first use."""
    name = str(request.param)
    if not runnable(name, cpu_flags()):
        pytest.skip(f"this CPU does not offer all that {name} needs")
    return name
