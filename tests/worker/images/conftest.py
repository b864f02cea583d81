"""Fixtures of the image tests: a tiny model on disk, a store, and images packed without a process."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_models import TinySpec

from naru_worker.adapters.images.planning import plan_image
from naru_worker.adapters.images.store import ImageStore
from naru_worker.adapters.images.tokenizer_sections import TokenizerSections
from naru_worker.adapters.images.writer import ImageWriter
from naru_worker.adapters.models.opening import open_files
from naru_worker.adapters.ops.native_lib import load_best

BUDGET_BYTES = 2**30

PackHere = Callable[[Path, Path], Path]
"""(source, destination folder) to an image packed in this process."""


@pytest.fixture
def source(tmp_path: Path, tiny_model: Callable[[TinySpec], Path]) -> Path:
    """A tiny model's folder that the test may change."""
    return Path(shutil.copytree(tiny_model(TinySpec()), tmp_path / "source"))


@pytest.fixture
def other_source(tmp_path: Path, tiny_model: Callable[[TinySpec], Path]) -> Path:
    """Other weights, the same tokenizer."""
    return Path(shutil.copytree(tiny_model(TinySpec(seed=1)), tmp_path / "other-source"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    """An empty store with room for everything."""
    store = ImageStore(tmp_path / "images", BUDGET_BYTES)
    yield store
    store.close()


@pytest.fixture
def go_on() -> threading.Event:
    """A stop event that nobody sets."""
    return threading.Event()


def pack_image(path: Path, folder: Path) -> Path:
    """What the packing process does, without the process; the image's path."""
    files = open_files(path)
    try:
        planned = plan_image(files, TokenizerSections())
        image = folder / f"{planned.index.digest}.naru"
        with open(image, "w+b") as file:
            file.truncate(planned.file_bytes)
            ImageWriter(load_best(), file.fileno(), planned, lambda done, total: None).write(files.checkpoint)
        return image
    finally:
        files.checkpoint.close()


@pytest.fixture(scope="session")
def pack_here() -> PackHere:
    """See `pack_image`."""
    return pack_image
