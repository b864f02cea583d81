"""Keeps what is slow without a GPU to `make test-gpu-offline`, and lets the interpreter lose less time."""

from __future__ import annotations

import os
import sys

import pytest
from quick_interpreter import hasten

hasten()


@pytest.fixture(autouse=True)
def own_upload_slots() -> None:
    """Slots that a device of another test's still holds are not this one's."""
    if "naru_worker.adapters.ops.cuda.device" in sys.modules:
        sys.modules["naru_worker.adapters.ops.cuda.device"].open_upload_slots.cache_clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu_offline` elsewhere."""
    if item.get_closest_marker("gpu_offline") and os.environ.get("NARU_GPU_OFFLINE") != "1":
        pytest.skip("slow without a GPU: make test-gpu-offline runs it")
