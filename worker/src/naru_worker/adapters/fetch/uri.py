"""Model URIs as values. Called by the fetcher; does no I/O.

``pypi://name[@version][/file]`` (or ``==version``), ``hf://org/name[@revision][/file]``, ``file:///path``.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from pathlib import PurePosixPath

from naru_proto.errors import LoadError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Formats that run code when they are read; never fetched, never opened."""

_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_REPO_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_MAX_URI_CHARS = 2048


@dataclass(frozen=True, slots=True)
class PackageUri:
    """A model inside a Python package."""

    name: str
    """Normalized: lower case, single hyphens."""
    version: str
    """Empty: the newest, or the one at hand."""
    file: str
    """Path inside the wheel; empty: the only model there."""


@dataclass(frozen=True, slots=True)
class HubUri:
    """A model repository of a hub."""

    org: str
    name: str
    revision: str
    """Branch, tag or commit; empty: main."""
    file: str
    """One file of it; empty: the repository's safetensors, else its only GGUF."""

    @property
    def repo(self) -> str:
        """``org/name``."""
        return f"{self.org}/{self.name}"


@dataclass(frozen=True, slots=True)
class LocalUri:
    """A file or folder of this machine."""

    path: str
    """Absolute."""


ModelUri = PackageUri | HubUri | LocalUri


def parse_uri(uri: str, revision: str = "") -> ModelUri:
    """Reads a model URI; ``revision`` fills the version or revision the URI leaves open.

    Raises:
        LoadError: unknown scheme, malformed name, or two revisions that disagree.
    """
    if len(uri) > _MAX_URI_CHARS or not uri.isprintable():
        raise _bad(uri[:80], "it is too long or holds characters that cannot be printed", "check the URI")
    scheme, sep, rest = uri.partition("://")
    if sep and scheme == "pypi":
        return _package(uri, rest, revision)
    if sep and scheme == "hf":
        return _hub(uri, rest, revision)
    if sep and scheme == "file":
        return _local(uri, rest, revision)
    raise _bad(uri, "its scheme is not known", "write pypi://name, hf://org/name or file:///path")


def _bad(uri: str, why: str, remedy: str) -> LoadError:
    return LoadError(f"model URI {uri!r}: {why}; {remedy}", param="model.uri")


def _one_revision(uri: str, inside: str, given: str) -> str:
    if inside and given and inside != given:
        raise _bad(uri, f"it names revision {inside!r} while revision says {given!r}", "keep one of the two")
    return inside or given


def _package(uri: str, rest: str, revision: str) -> PackageUri:
    spec, _, file = rest.partition("/")
    name, _, version = spec.replace("==", "@", 1).partition("@")
    version = _one_revision(uri, version, revision)
    if not _PACKAGE.fullmatch(name):
        raise _bad(uri, f"{name!r} is no package name", "write pypi://name or pypi://name@version")
    if ("@" in spec or "==" in spec or version) and not _VERSION.fullmatch(version):
        raise _bad(uri, f"{version!r} is no version", "write pypi://name@1.2.3")
    return PackageUri(re.sub(r"[-_.]+", "-", name).lower(), version, _inner_file(uri, file))


def _hub(uri: str, rest: str, revision: str) -> HubUri:
    org, _, tail = rest.partition("/")
    spec, _, file = tail.partition("/")
    name, _, inside = spec.partition("@")
    inside = _one_revision(uri, urllib.parse.unquote(inside), revision)
    for part in (org, name):
        if not _REPO_PART.fullmatch(part) or ".." in part:
            raise _bad(uri, f"{part!r} is no organization or repository name", "write hf://org/name")
    if ("@" in spec or inside) and (not _REVISION.fullmatch(inside) or ".." in inside or "//" in inside):
        raise _bad(uri, f"{inside!r} is no branch, tag or commit", "write hf://org/name@main")
    return HubUri(org, name, inside, _inner_file(uri, file))


def _inner_file(uri: str, file: str) -> str:
    if not file:
        return ""
    file = urllib.parse.unquote(file)
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or str(path) != file:
        raise _bad(uri, f"{file!r} is no path inside it", "name the file as it stands there")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise _bad(uri, f"{path.name!r} is a pickle, which runs code when read", "use safetensors or GGUF")
    if path.suffix.lower() != ".gguf":
        raise _bad(uri, f"{path.name!r} is not a GGUF file", "name a .gguf file, or leave the file out")
    return file


def _local(uri: str, rest: str, revision: str) -> LocalUri:
    if revision:
        raise _bad(uri, f"a file has no revision, yet revision says {revision!r}", "remove the revision")
    path = urllib.parse.unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
    if not path.startswith("/") or "\0" in path:
        raise _bad(uri, "the path is not absolute", "write file:///absolute/path")
    return LocalUri(path)
