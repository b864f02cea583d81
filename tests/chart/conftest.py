"""Fixtures of the chart's tests: Helm, or a reason why there is none."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

pytest.importorskip("yaml")


@pytest.fixture(scope="session", autouse=True)
def helm() -> str:
    """Helm's path; skips where it is absent, but not where it could have been built."""
    from helm_chart import find_helm

    found = find_helm()
    if found is None:
        reason = "Helm is neither on PATH nor in NARU_CLUSTER_CACHE: `make e2e-controlplane` builds it"
        if os.environ.get("CI") == "true" and shutil.which("go"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
