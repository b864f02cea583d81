"""Fixtures of the tests on a real Kubernetes cluster, see `e2e/cluster`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

# As in tests/conftest.py, which these tests may run without: pytest-asyncio would find a loop that nobody closes.
asyncio.set_event_loop(None)

# Reusable test code is plain modules, so the folder goes onto the path.
sys.path.insert(0, str(Path(__file__).parent / "cluster" / "support"))

from naru_cluster.fixtures import (  # noqa: E402, F401 - after the path; pytest finds them by name
    cluster,
    cluster_namespace,
    control_plane,
    crds,
    namespace,
    pytest_runtest_call,
    pytest_runtest_makereport,
)
