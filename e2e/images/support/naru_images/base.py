"""The local base images: Debian made by debootstrap, as a stand-in for the published one. Called by the builder.

Two of them: what images run on, and the same with a compiler and Python's venv, which the build stages use.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from naru_images.buildah import Buildah, require_tools, run

SUITE = "bookworm"
RUNTIME_PACKAGES = ("python3", "ca-certificates", "tini")
BUILD_PACKAGES = ("python3-venv", "g++")
MIRROR_VARIABLE = "NARU_DEBIAN_MIRROR"
"""URL of a Debian mirror; without it debootstrap's own default."""

# Published slim images leave the same out.
_LEFT_OUT = (
    "usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian",
    "var/cache/apt", "var/lib/apt/lists", "var/log",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BaseImages:
    """Names of the two base images."""

    runtime: str
    build: str


def base_digest() -> str:
    """Twelve hex digits of all that decides what a base image holds."""
    parts = (SUITE, *RUNTIME_PACKAGES, "|", *BUILD_PACKAGES, "|", *_LEFT_OUT, os.environ.get(MIRROR_VARIABLE, ""))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def ensure_base(buildah: Buildah) -> BaseImages:
    """Makes the base images, unless they are there.

    Raises:
        BuildError: a tool is missing or failed; most often there is no network.
    """
    digest = base_digest()
    images = BaseImages(f"naru.local/base:{digest}", f"naru.local/build-base:{digest}")
    if not buildah.has_image(images.runtime):
        _bootstrap(buildah, images.runtime)
    if not buildah.has_image(images.build):
        _add_compiler(buildah, images)
    return images


def _bootstrap(buildah: Buildah, name: str) -> None:
    require_tools("debootstrap")
    with tempfile.TemporaryDirectory(prefix="naru-base-") as scratch:
        root = Path(scratch) / "root"
        mirror = [url] if (url := os.environ.get(MIRROR_VARIABLE, "")) else []
        packages = ",".join(RUNTIME_PACKAGES)
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root), *mirror]
        run(command, is_shown=True)
        for folder in _LEFT_OUT:
            shutil.rmtree(root / folder, ignore_errors=True)
            # apt and dpkg expect the folders themselves.
            (root / folder).mkdir(parents=True)
        with buildah.container("scratch") as container:
            with buildah.mounted(container) as target:
                # cp, not shutil: it keeps owners, links and times.
                run(["cp", "--archive", f"{root}/.", str(target)])
            buildah("config", "--cmd", "/bin/sh", "--env", "LANG=C.UTF-8", container)
            buildah("commit", "--quiet", container, name)


def _add_compiler(buildah: Buildah, images: BaseImages) -> None:
    install = f"apt-get update && apt-get install --yes --no-install-recommends {' '.join(BUILD_PACKAGES)}"
    clean = "rm -rf /var/lib/apt/lists/* /var/cache/apt/*"
    with buildah.container(images.runtime) as container:
        buildah("run", "--isolation", "chroot", container, "--", "sh", "-c", f"{install} && {clean}", is_shown=True)
        buildah("commit", "--quiet", container, images.build)
