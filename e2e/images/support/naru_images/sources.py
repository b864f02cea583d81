"""What an image is made of: the files its build reads, and their digest. Called by the builder; builds nothing."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[4]

_SKIPPED_PARTS = {"__pycache__"}
_SKIPPED_SUFFIXES = {".so", ".pyc"}


@dataclass(frozen=True, slots=True)
class Part:
    """A program that has an image."""

    name: str
    dockerfile: str
    sources: tuple[str, ...]
    """Files and folders that its build reads, below the project's root."""

    @property
    def image(self) -> str:
        """The image's name without tag."""
        return f"naru.local/{self.name}"


def _own(name: str) -> Part:
    texts = (".containerignore", "LICENSE", "README.md", "hatch_build.py", "pyproject.toml")
    locks = tuple(f"images/requirements/{lock}.txt" for lock in ("build", name))
    return Part(name, f"images/{name}.Dockerfile", (*texts, *locks, "images/steps", "proto/src", f"{name}/src"))


OWN_PARTS = (_own("operator"), _own("router"), _own("worker"))
REDIS = Part("redis", "e2e/images/redis.Dockerfile", ("images/steps/packages.sh",))
"""Stands in for the published image that the chart names."""
PARTS = (*OWN_PARTS, REDIS)


def project_version(root: Path = PROJECT_ROOT) -> str:
    """The version in pyproject.toml."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def source_files(part: Part, root: Path = PROJECT_ROOT) -> Iterator[Path]:
    """Every file that the build of a part's image reads, in a fixed order."""
    for name in (part.dockerfile, *part.sources):
        path = root / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            relative = file.relative_to(root)
            is_skipped = _SKIPPED_PARTS & set(relative.parts) or file.suffix in _SKIPPED_SUFFIXES
            if file.is_file() and not is_skipped and not any(p.startswith(".build_") for p in relative.parts):
                yield file


def source_digest(part: Part, base: str, root: Path = PROJECT_ROOT) -> str:
    """Sixteen hex digits that change when a file of the image or its base does."""
    digest = hashlib.sha256(base.encode() + b"\0")
    for file in source_files(part, root):
        content = file.read_bytes()
        mode = "x" if file.stat().st_mode & 0o111 else "-"
        digest.update(f"{file.relative_to(root)}\0{mode}{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
