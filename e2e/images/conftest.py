"""Fixtures of the image tests: the images of this checkout, built where sources have changed, and unpacked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

if TYPE_CHECKING:
    from image_run import Image
    from naru_images.builder import Builder, BuiltImage


@pytest.fixture(scope="session")
def builder() -> Builder:
    """On this machine's cache."""
    if not os.environ.get("NARU_E2E"):
        pytest.skip("slow: builds images; set NARU_E2E=1, as `make e2e` does")
    from naru_images.buildah import TOOLS, require_tools
    from naru_images.builder import Builder

    require_tools(*TOOLS)
    return Builder()


@pytest.fixture(scope="session")
def built(builder: Builder) -> dict[str, BuiltImage]:
    """All images, by part."""
    return {image.part.name: image for image in builder.build()}


@pytest.fixture(scope="session")
def images(builder: Builder, built: dict[str, BuiltImage]) -> Iterator[dict[str, Image]]:
    """The images unpacked, by part."""
    from contextlib import ExitStack

    from image_run import unpacked

    with ExitStack() as stack:
        yield {
            name: stack.enter_context(unpacked(builder.buildah, f"{image.part.image}:{image.digest}"))
            for name, image in built.items()
        }
