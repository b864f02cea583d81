"""Writes an image under several names into one OCI archive for `ctr -n k8s.io images import`. Called by the builder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from naru_images.buildah import Buildah

_NAME_ANNOTATION = "io.containerd.image.name"
"""Where containerd looks for the full name; without it an import invents one."""


def write_archive(buildah: Buildah, image: str, names: Mapping[str, Mapping[str, str]], target: Path) -> None:
    """Writes ``target``: the image under each full name, with more labels; the layers are in it once.

    Not compressed: that would cost more time than it saves on one machine.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".oci-", dir=target.parent) as scratch:
        blobs = Path(scratch) / "blobs"
        buildah("push", "--quiet", "--disable-compression", "--format", "oci", image, f"dir:{blobs}")
        manifest = json.loads((blobs / "manifest.json").read_bytes())
        config = json.loads((blobs / _hex(manifest["config"]["digest"])).read_bytes())
        archive = Path(scratch) / "archive.tar"
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            for digest in sorted({_hex(layer["digest"]) for layer in manifest["layers"]}):
                tar.add(blobs / digest, f"blobs/sha256/{digest}")
            index = [_add_image(tar, manifest, config, name, labels) for name, labels in names.items()]
            _add(tar, "index.json", _encode({"schemaVersion": 2, "manifests": index}))
            _add(tar, "oci-layout", _encode({"imageLayoutVersion": "1.0.0"}))
        os.replace(archive, target)


def _add_image(
    tar: tarfile.TarFile, manifest: dict[str, Any], config: dict[str, Any], name: str, labels: Mapping[str, str]
) -> dict[str, Any]:
    """Adds configuration and manifest of one name; returns its entry in the index."""
    settings = config["config"]
    content = _encode({**config, "config": {**settings, "Labels": {**settings.get("Labels", {}), **labels}}})
    described = {"mediaType": manifest["config"]["mediaType"], **_add_blob(tar, content)}
    entry = _add_blob(tar, _encode({**manifest, "config": described}))
    annotations = {_NAME_ANNOTATION: name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    return {"mediaType": manifest["mediaType"], **entry, "annotations": annotations}


def _add_blob(tar: tarfile.TarFile, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    _add(tar, f"blobs/sha256/{digest}", content)
    return {"digest": f"sha256:{digest}", "size": len(content)}


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
