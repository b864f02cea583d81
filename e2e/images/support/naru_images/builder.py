"""Builds the images whose sources have changed and keeps their archives. Called by the command line and by tests.

An archive is named by the digest of its sources: an unchanged tree builds nothing. Older ones are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from naru_images.archive import write_archive
from naru_images.base import BaseImages, base_digest, ensure_base
from naru_images.buildah import Buildah, BuildError
from naru_images.sources import PARTS, PROJECT_ROOT, Part, project_version, source_digest

TAG = "e2e"
SECOND_TAG = "e2e-2"
"""The same content under another name: what a rollout changes to."""
SECOND_LABELS = {"serving.naru.dev/build": "2"}
CA_VARIABLE = "SSL_CERT_FILE"
"""A file of certificates that builds trust; it is mounted while they run and gets into no image."""
_MAX_STEPS = 400
"""Images of build steps that are kept to save work; beyond it all go but the results."""
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image and where its archive is."""

    part: Part
    digest: str
    """Of its sources."""
    archive: Path
    seconds: float
    """What building took; 0 when it was there."""

    @property
    def names(self) -> tuple[str, str]:
        """The names in the archive, for a container runtime."""
        return f"{self.part.image}:{TAG}", f"{self.part.image}:{SECOND_TAG}"


def default_cache() -> Path:
    """Below ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "naru" / "cluster"


class Builder:
    """Builds below one cache folder; one at a time, others wait."""

    def __init__(self, cache: Path | None = None) -> None:
        """Makes the folders."""
        self._cache = cache or default_cache()
        self._archives = self._cache / "images"
        self._archives.mkdir(parents=True, exist_ok=True)
        self.buildah = Buildah(self._cache / "buildah")

    def base(self) -> BaseImages:
        """The base images, made now when they are not there."""
        with self._locked():
            return ensure_base(self.buildah)

    def build(self, parts: Sequence[Part] = PARTS, folder: Path | None = None) -> list[BuiltImage]:
        """The images of the present sources; with ``folder``, their archives are put there as NAME.tar.

        Raises:
            BuildError: a tool is missing, or a build failed.
        """
        with self._locked():
            built = [self._ensure(part) for part in parts]
            if folder is None:
                return built
            return [replace(image, archive=_copy(image.archive, folder / f"{image.part.name}.tar")) for image in built]

    def _ensure(self, part: Part) -> BuiltImage:
        started = time.monotonic()
        digest = source_digest(part, base_digest())
        archive = self._archives / f"{part.name}-{digest}.tar"
        if archive.is_file() and self.buildah.has_image(f"{part.image}:{digest}"):
            return BuiltImage(part, digest, archive, 0.0)
        base = ensure_base(self.buildah)
        image = f"{part.image}:{digest}"
        downloads = self._cache / "downloads"
        downloads.mkdir(exist_ok=True)
        self.buildah(*_build_command(part, base, digest, image, downloads), is_shown=True)
        names = {f"{part.image}:{TAG}": {}, f"{part.image}:{SECOND_TAG}": SECOND_LABELS}
        write_archive(self.buildah, image, names, archive)
        built = BuiltImage(part, digest, archive, time.monotonic() - started)
        self._drop_older(built)
        return built

    def _drop_older(self, built: BuiltImage) -> None:
        for archive in self._archives.glob(f"{built.part.name}-*.tar"):
            if archive != built.archive:
                archive.unlink()
        listed = self.buildah("images", "--format", "{{.Name}}:{{.Tag}}", "--noheading").split()
        older = [
            n for n in listed if n.startswith(f"{built.part.image}:") and n != f"{built.part.image}:{built.digest}"
        ]
        for image in older:
            # One that another process still runs is left to a later build.
            with contextlib.suppress(BuildError):
                self.buildah("rmi", image)
        if len(self.buildah("images", "--all", "--quiet").split()) > _MAX_STEPS:
            with contextlib.suppress(BuildError):
                self.buildah("rmi", "--prune")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._cache / "images.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def export_archives(folder: Path, parts: Sequence[Part] = PARTS) -> list[Path]:
    """One archive for each image in ``folder``, built before where the sources have changed.

    Raises:
        BuildError: a tool is missing, or a build failed.
    """
    return [image.archive for image in Builder().build(parts, folder)]


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        # A later build may remove the archive of the cache, never this one.
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target


def _build_command(part: Part, base: BaseImages, digest: str, name: str, downloads: Path) -> list[str]:
    secrets = []
    if (ca := os.environ.get(CA_VARIABLE, "")) and Path(ca).is_file():
        secrets += ["--secret", f"id=ca,src={ca}"]
    if index := next((variable for variable in INDEX_VARIABLES if os.environ.get(variable)), ""):
        secrets += ["--secret", f"id=index,env={index}"]
    arguments = {"BASE_IMAGE": base.runtime, "BUILD_IMAGE": base.build}
    labels = {"version": project_version(), "revision": digest}
    return [
        "build", "--isolation", "chroot", "--layers", "--pull-never",
        "--ignorefile", str(PROJECT_ROOT / ".containerignore"),
        # A volume, since buildah 1.28 empties the whole stage when it takes a cache mount away.
        "--volume", f"{downloads}:/mnt",
        *secrets, *(word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")),
        *(word for key, value in labels.items() for word in ("--label", f"org.opencontainers.image.{key}={value}")),
        "--file", str(PROJECT_ROOT / part.dockerfile), "--tag", name, str(PROJECT_ROOT),
    ]  # fmt: skip
