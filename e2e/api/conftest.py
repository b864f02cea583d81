"""One instance of Naru with a model of each kind, for real clients and for the examples of the docs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "local" / "support"))

from every_kind import MANIFESTS, write_doubler
from running_naru import RunningNaru

LONG = {"test_clients.py", "test_examples.py", "test_stories.py", "test_fuzz.py"}
"""With `make test-api`: minutes, most of them the start of clients."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the long ones out where they are not asked for."""
    if os.environ.get("NARU_E2E"):
        return
    skip = pytest.mark.skip(reason="long: run `make test-api`, or set NARU_E2E=1")
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name in LONG:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNaru]:
    """`naru up` with smollm2, minilm and doubler."""
    folder = tmp_path_factory.mktemp("api")
    doubler = write_doubler(folder / "repository")
    manifests = folder / "models.yaml"
    manifests.write_text(MANIFESTS.format(doubler=doubler.as_uri()), "utf-8")
    home = folder / "home"
    home.mkdir()
    with RunningNaru([str(manifests)], home) as running:
        yield running
