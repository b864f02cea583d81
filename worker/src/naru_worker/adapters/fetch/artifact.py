"""What the manifest of an OCI artifact says of its files. Called by the oci scheme; does no I/O.

Three forms: layers that are files with a name (ORAS, ModelPack's raw layers), layers that are tar archives of a model
(KitOps, ModelPack), and images with the model below /models (KServe's modelcars). Sources: OCI image specification 1.1,
the CNCF model specification.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from naru_proto.errors import LoadError

MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20
"""What the distribution specification allows."""
IMAGE_FOLDER = "models/"
"""Where an image keeps the model."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_MAX_LAYERS = 1000
_TITLES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_UNPACK = "io.deis.oras.content.unpack"
_NAMELESS = {
    "application/vnd.docker.ai.gguf.v3": "model.gguf",
    "application/vnd.ollama.image.model": "model.gguf",
}
"""Layer types that are one file whose name nobody wrote down."""

LayerForm = Literal["file", "tar", "tar+gzip"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob with files of the model."""

    digest: str
    size_bytes: int
    form: LayerForm
    title: str
    """Path of a file; empty for archives."""

    @property
    def hexdigest(self) -> str:
        """The sha256."""
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class Artifact:
    """The layers of a manifest, in their order."""

    layers: tuple[Layer, ...]
    is_image: bool
    """Its archives are parts of a file system: the model lies below IMAGE_FOLDER."""


def parse_manifest(content: bytes, label: str) -> dict[str, Any]:
    """A manifest or index as JSON.

    Raises:
        LoadError: it is none.
    """
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise LoadError(f"{label}: its manifest is no JSON; check that the address is a registry's") from exc
    if not isinstance(manifest, dict) or not ("layers" in manifest or "manifests" in manifest):
        raise LoadError(f"{label}: its manifest has neither layers nor manifests; push the model again")
    return manifest


def choose_manifest(index: Mapping[str, Any], machine: str, label: str) -> str:
    """The digest to take of an index: its only manifest, else the one for linux on this machine.

    Raises:
        LoadError: none, or several that could be meant.
    """
    try:
        offers = [
            (str(item["digest"]), item.get("platform") or {})
            for item in index["manifests"]
            if (item.get("annotations") or {}).get("vnd.docker.reference.type") != "attestation-manifest"
        ]
    except (KeyError, TypeError, AttributeError) as exc:
        raise LoadError(f"{label}: its index is broken ({exc!r}); push the model again") from exc
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    fitting = [
        digest
        for digest, platform in offers
        if len(offers) == 1 or (platform.get("os"), platform.get("architecture")) == ("linux", architecture)
    ]
    if len(fitting) != 1 or not _DIGEST.fullmatch(fitting[0]):
        shown = ", ".join(digest for digest, _ in offers[:4]) or "none"
        raise LoadError(f"{label}: its index has {len(offers)} manifests; name one of them by its digest: {shown}")
    return fitting[0]


def read_artifact(manifest: Mapping[str, Any], label: str) -> Artifact:
    """The layers that may hold a model.

    Raises:
        LoadError: hostile or broken layers, or a form that cannot be read.
    """
    try:
        items = list(manifest["layers"])
        config_type = (manifest.get("config") or {}).get("mediaType", "")
        if len(items) > _MAX_LAYERS:
            raise LoadError(f"{label}: has {len(items)} layers, more than {_MAX_LAYERS}; it is no model")
        layers = [layer for item in items if (layer := _layer(item, label)) is not None]
    except (KeyError, TypeError, AttributeError) as exc:
        raise LoadError(f"{label}: its manifest is broken ({exc!r}); push the model again") from exc
    if not layers:
        raise LoadError(f"{label}: has no layer with files of a model; push them with `oras push` or as a tar layer")
    return Artifact(tuple(layers), config_type in _IMAGE_CONFIGS and not any(layer.title for layer in layers))


def _layer(item: Mapping[str, Any], label: str) -> Layer | None:
    digest, size, media_type = item["digest"], item["size"], str(item.get("mediaType", ""))
    annotations = item.get("annotations") or {}
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise LoadError(f"{label}: layer digest {str(digest)[:80]!r} is no sha256; push the model again")
    if type(size) is not int or size < 0:
        raise LoadError(f"{label}: layer {digest} has size {str(size)[:40]}; push the model again")
    title = next((str(annotations[key]) for key in _TITLES if key in annotations), _NAMELESS.get(media_type, ""))
    form = _archive_form(media_type, label)
    if title and (annotations.get(_UNPACK) == "true" or (form is not None and "cncf.model" in media_type)):
        return Layer(digest, size, form or "tar+gzip", "")
    if title and not media_type.startswith("application/vnd.kitops."):
        return Layer(digest, size, "file", checked_path(title, label))
    return Layer(digest, size, form, "") if form is not None else None


def _archive_form(media_type: str, label: str) -> LayerForm | None:
    if media_type.endswith((".tar+gzip", ".tar.gzip", "+tar+gzip")):
        return "tar+gzip"
    if media_type.endswith((".tar", "+tar")):
        return "tar"
    if media_type.endswith((".tar+zstd", ".tar.zstd")):
        raise LoadError(f"{label}: a layer is {media_type!r}; zstd is not read here, push it as tar or tar+gzip")
    return None


def checked_path(path: str, label: str) -> str:
    """A path that stays inside of wherever it is put.

    Raises:
        LoadError: it does not.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable() or len(path) > 1024:
        raise LoadError(f"{label}: file {path[:200]!r} leads out of the artifact; do not use it")
    return "/".join(part for part in parts if part != ".") or "."
