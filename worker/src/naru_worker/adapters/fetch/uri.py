"""Model URIs as values. Called by the fetcher; does no I/O.

``pypi://name[@version][/file]`` (or ``==version``), ``hf://org/name[@revision][/file]``, ``s3://bucket/path``,
``gs://bucket/path``, ``oci://registry/repository[:tag][@digest][/file]``, ``pvc://claim/path``, ``file:///path``.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from naru_proto.errors import LoadError

SINGLE_SUFFIXES = (".gguf", ".onnx")
"""A file of these can be a model by itself."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Formats that run code when they are read; never fetched, never opened."""

_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_REPO_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_BUCKET = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]{1,221}")
_VERSION_ID = re.compile(r"[\x21-\x7e]{1,1024}")
_ARTIFACT = re.compile(
    r"(?P<registry>[A-Za-z0-9][-.A-Za-z0-9]*(:[0-9]{1,5})?|\[[0-9a-fA-F:]+\](:[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*)"
    r"(:(?P<tag>[A-Za-z0-9_][-.A-Za-z0-9_]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?(/(?P<file>.*))?"
)
_TAG = re.compile(r"[A-Za-z0-9_][-.A-Za-z0-9_]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
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


@dataclass(frozen=True, slots=True)
class BucketUri:
    """An object or a folder of an object store."""

    scheme: str
    """s3 or gs."""
    bucket: str
    path: str
    """Of one GGUF or ONNX object, or of a folder; empty: the whole bucket."""
    version: str
    """Of the object; empty: the newest."""

    @property
    def address(self) -> str:
        """The URI, without the version."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

    @property
    def is_object(self) -> bool:
        """Whether it names one object, not a folder."""
        return self.path.lower().endswith(SINGLE_SUFFIXES)


@dataclass(frozen=True, slots=True)
class ArtifactUri:
    """An artifact or image of an OCI registry."""

    registry: str
    """host or host:port."""
    repository: str
    tag: str
    """Empty when there is a digest."""
    digest: str
    """Of the manifest, sha256:hex; empty: what the tag stands for."""
    file: str
    """One GGUF of it; empty: the only model there."""

    @property
    def address(self) -> str:
        """The URI, without the file."""
        mark = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"oci://{self.registry}/{self.repository}{mark}"


@dataclass(frozen=True, slots=True)
class ClaimUri:
    """A file or folder of a mounted claim."""

    claim: str
    path: str
    """Relative; empty: all of it."""


ModelUri = PackageUri | HubUri | LocalUri | BucketUri | ArtifactUri | ClaimUri


def parse_uri(uri: str, revision: str = "") -> ModelUri:
    """Reads a model URI; ``revision`` fills the version or revision the URI leaves open.

    Raises:
        LoadError: unknown scheme, malformed name, or two revisions that disagree.
    """
    if len(uri) > _MAX_URI_CHARS or not uri.isprintable():
        raise _bad(uri[:80], "it is too long or holds characters that cannot be printed", "check the URI")
    scheme, sep, rest = uri.partition("://")
    parse = _PARSERS.get(scheme) if sep else None
    if parse is None:
        known = ", ".join(f"{name}://" for name in sorted(_PARSERS))
        raise _bad(uri, "its scheme is not known", f"write one of {known}, for example pypi://name or hf://org/name")
    return parse(uri, rest, revision)


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
    if path.suffix.lower() not in SINGLE_SUFFIXES:
        raise _bad(
            uri,
            f"{path.name!r} is not a GGUF file, nor an ONNX one",
            "name a .gguf or .onnx file, or leave the file out",
        )
    return file


def _local(uri: str, rest: str, revision: str) -> LocalUri:
    if revision:
        raise _bad(uri, f"a file has no revision, yet revision says {revision!r}", "remove the revision")
    path = urllib.parse.unquote(rest.removeprefix("localhost") if rest.startswith("localhost/") else rest)
    if not path.startswith("/") or "\0" in path:
        raise _bad(uri, "the path is not absolute", "write file:///absolute/path")
    return LocalUri(path)


def _bucket(uri: str, rest: str, revision: str) -> BucketUri:
    scheme = uri.partition("://")[0]
    bucket, _, path = rest.partition("/")
    path = path.rstrip("/")
    parts = path.split("/") if path else []
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise _bad(uri, f"{bucket!r} is no bucket name", f"write {scheme}://bucket/path")
    if any(part in ("", ".", "..") for part in parts):
        raise _bad(uri, f"{path!r} is no path of an object", "write it without empty parts and without dots as parts")
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise _bad(uri, f"{parts[-1]!r} is a pickle, which runs code when read", "use safetensors or GGUF")
    if suffix == ".safetensors":
        raise _bad(uri, "a lone .safetensors file lacks its config and tokenizer", "name the folder that holds it")
    if revision and suffix not in SINGLE_SUFFIXES:
        raise _bad(
            uri, f"a folder has no version, yet revision says {revision!r}", "name a .gguf object, or leave it out"
        )
    if revision and not _VERSION_ID.fullmatch(revision):
        raise _bad(uri, f"{revision!r} is no object version", "write the version id as the store shows it")
    if scheme == "gs" and revision and not revision.isdigit():
        raise _bad(uri, f"{revision!r} is no generation of an object", "write its number")
    return BucketUri(scheme, bucket, path, revision)


def _artifact(uri: str, rest: str, revision: str) -> ArtifactUri:
    match = _ARTIFACT.fullmatch(rest)
    # Without a tag or digest before it, a file could not be told from a part of the repository's path.
    if match is None or (match["file"] is not None and not (match["tag"] or match["digest"])):
        raise _bad(uri, "it is no reference to an artifact", "write oci://registry/repository:tag or ...@sha256:digest")
    tag, digest = match["tag"] or "", match["digest"] or ""
    if revision.startswith("sha256:"):
        digest = _one_revision(uri, digest, revision)
    elif revision:
        tag = _one_revision(uri, tag, revision)
    if not re.fullmatch(r"(sha256:[0-9a-f]{64})?", digest) or not re.fullmatch(
        r"([A-Za-z0-9_][-.A-Za-z0-9_]{0,127})?", tag
    ):
        raise _bad(uri, f"{revision!r} is no tag and no digest", "write a tag, or sha256: and 64 hex digits")
    if not digest and not tag:
        tag = "latest"
    return ArtifactUri(match["registry"], match["repository"], tag, digest, _inner_file(uri, match["file"] or ""))


def _claim(uri: str, rest: str, revision: str) -> ClaimUri:
    claim, _, path = rest.partition("/")
    path = urllib.parse.unquote(path).strip("/")
    if revision:
        raise _bad(uri, f"a claim's files have no revision, yet revision says {revision!r}", "remove the revision")
    if not _CLAIM.fullmatch(claim) or ".." in claim:
        raise _bad(uri, f"{claim!r} is no name of a claim", "write pvc://claim/path")
    if path and (any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path):
        raise _bad(
            uri, f"{path!r} is no path inside the claim", "write it without empty parts and without dots as parts"
        )
    return ClaimUri(claim, path)


_PARSERS: dict[str, Callable[[str, str, str], ModelUri]] = {
    "file": _local,
    "gs": _bucket,
    "hf": _hub,
    "oci": _artifact,
    "pvc": _claim,
    "pypi": _package,
    "s3": _bucket,
}
