"""What the mirror serves: wheels of packages, and folders as repositories of a hub. Called by the server.

Reads files and hashes them once; opens no socket.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
_LFS_MIN_BYTES = 10 << 20
"""Above it a hub keeps any file outside of git."""
_CHUNK_BYTES = 1 << 20


class CatalogError(Exception):
    """Something cannot be served; the message names it."""


def canonical_name(name: str) -> str:
    """A project's name as an index spells it. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _hash_file(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One wheel of the index."""

    path: Path
    project: str
    version: str
    sha256: str
    size_bytes: int


def read_wheel(path: Path) -> WheelFile:
    """A wheel on disk.

    Raises:
        CatalogError: it is not there, or its name is no wheel's.
    """
    parts = path.name.removesuffix(".whl").split("-")
    if path.suffix != ".whl" or len(parts) not in (5, 6):
        raise CatalogError(f"{path.name!r} is no wheel's name")
    if not path.is_file():
        raise CatalogError(f"wheel {str(path)!r} is not there")
    sha256 = _hash_file(path, hashlib.sha256())
    return WheelFile(path, canonical_name(parts[0]), parts[1], sha256, path.stat().st_size)


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """One file of a repository."""

    name: str
    path: Path
    size_bytes: int
    oid: str
    """Of the git blob; of its pointer where the file is kept outside of git."""
    sha256: str
    is_lfs: bool

    @property
    def etag(self) -> str:
        """Without quotes."""
        return self.sha256 if self.is_lfs else self.oid


@dataclass(frozen=True, slots=True)
class Revision:
    """A repository at one commit."""

    commit: str
    files: dict[str, RepositoryFile]


def read_revision(folder: Path) -> Revision:
    """A folder as a commit; the same content gives the same commit.

    Raises:
        CatalogError: no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise CatalogError(f"repository folder {str(folder)!r} is not there")
    files = {file.name: file for file in map(lambda path: _read_file(folder, path), _files_of(folder))}
    if not files:
        raise CatalogError(f"repository folder {str(folder)!r} holds no file")
    listing = "".join(f"{file.name}\0{file.sha256}\n" for file in files.values())
    return Revision(hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest(), files)


def _files_of(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _read_file(folder: Path, path: Path) -> RepositoryFile:
    size, name = path.stat().st_size, str(path.relative_to(folder))
    sha256 = _hash_file(path, hashlib.sha256())
    is_lfs = name.endswith(_LFS_SUFFIXES) or size > _LFS_MIN_BYTES
    if is_lfs:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        blob = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer, usedforsecurity=False)
        return RepositoryFile(name, path, size, blob.hexdigest(), sha256, True)
    oid = _hash_file(path, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False))
    return RepositoryFile(name, path, size, oid, sha256, False)


@dataclass(slots=True)
class Catalog:
    """All that is served; may be added to while the server runs."""

    wheels: dict[str, WheelFile] = field(default_factory=dict)
    """By file name."""
    revisions: dict[str, dict[str, Revision]] = field(default_factory=dict)
    """By repository (``org/name``), then by branch or tag."""
    tokens: dict[str, str] = field(default_factory=dict)
    """What a gated repository asks for."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_wheel(self, path: Path) -> WheelFile:
        """Offers a wheel; see `read_wheel` for what it raises."""
        wheel = read_wheel(path)
        with self.lock:
            self.wheels[path.name] = wheel
        return wheel

    def add_revision(self, repository: str, folder: Path, name: str = "main", *, token: str = "") -> Revision:
        """Offers a folder as a revision; see `read_revision` for what it raises.

        A token, once given, is asked for by the whole repository.
        """
        revision = read_revision(folder)
        with self.lock:
            self.revisions.setdefault(repository, {})[name] = revision
            if token:
                self.tokens[repository] = token
        return revision

    def wheels_of(self, project: str) -> list[WheelFile]:
        """The wheels of a project, by file name."""
        with self.lock:
            found = [wheel for wheel in self.wheels.values() if wheel.project == canonical_name(project)]
        return sorted(found, key=lambda wheel: wheel.path.name)

    def find_revision(self, repository: str, name: str) -> Revision | None:
        """A revision by branch, tag or commit."""
        with self.lock:
            known = self.revisions.get(repository, {})
            by_commit = {revision.commit: revision for revision in known.values()}
            return known.get(name) or by_commit.get(name)

    def find_object(self, sha256: str) -> RepositoryFile | None:
        """A file that is kept outside of git, by its hash."""
        with self.lock:
            revisions = [revision for known in self.revisions.values() for revision in known.values()]
        files = (file for revision in revisions for file in revision.files.values())
        return next((file for file in files if file.is_lfs and file.sha256 == sha256), None)
