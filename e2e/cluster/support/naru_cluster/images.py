"""Small container images without a registry: an OCI archive with one layer, written by a few lines of Python.

Called when a node starts, and by tests that need an image of their own. Large images are built elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from naru_cluster.errors import Unavailable
from naru_cluster.parts import Parts

TINY_IMAGE = "naru.local/tiny:1"
PAUSE_IMAGE = "naru.local/pause:1"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(
    target: Path,
    reference: str,
    *,
    files: Mapping[str, Path | bytes],
    links: Mapping[str, str] | None = None,
    folders: Iterable[str] = (),
    config: Mapping[str, Any],
) -> Path:
    """Writes an image and returns `target`.

    `files` maps paths inside to executable files here or to content, `links` paths inside to what they lead to.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in folders:
            tar.addfile(_entry(folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755))
        for path, source in files.items():
            content = source.read_bytes() if isinstance(source, Path) else source
            entry = _entry(path, tarfile.REGTYPE, 0o755 if isinstance(source, Path) else 0o644)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for path, aim in (links or {}).items():
            entry = _entry(path, tarfile.SYMTYPE, 0o777)
            entry.linkname = aim
            tar.addfile(entry)
    _write_archive(target, reference, layer.getvalue(), config)
    return target


def node_images(folder: Path, parts: Parts) -> list[Path]:
    """Archives of the images every node has: pause and tiny; written where they are not yet."""
    pause, tiny = folder / "pause.tar", folder / "tiny.tar"
    if not folder.exists():
        folder.mkdir()
        files = {"pause": Path(parts.path("pause"))}
        write_image(pause, PAUSE_IMAGE, files=files, config={"Entrypoint": ["/pause"]})
        write_tiny(tiny)
    return [pause, tiny]


def write_tiny(target: Path) -> Path:
    """A shell and the usual small tools: Debian's static busybox.

    Raises:
        Unavailable: busybox is not here.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise Unavailable("busybox is not here: run `apt-get install -y busybox-static`")
    tools = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    accounts = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65532:65532:nobody:/:/bin/sh\n"
    return write_image(
        target,
        TINY_IMAGE,
        files={"bin/busybox": Path(busybox), "etc/passwd": accounts},
        links={f"bin/{tool}": "busybox" for tool in tools if tool != "busybox"},
        folders=("bin", "etc", "tmp", "proc", "sys", "dev", "www"),
        config={"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]},
    )


def _entry(path: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.type = kind
    entry.mode = mode
    return entry


def _write_archive(target: Path, reference: str, layer: bytes, config: Mapping[str, Any]) -> None:
    about: dict[str, Any] = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    config_blob = json.dumps(about).encode()
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": _descriptor(_CONFIG, config_blob),
        "layers": [_descriptor(_LAYER, layer)],
    }
    manifest_blob = json.dumps(manifest).encode()
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference.rsplit(":", 1)[1]}
    index = {"schemaVersion": 2, "manifests": [{**_descriptor(_MANIFEST, manifest_blob), "annotations": names}]}
    entries = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode()}
    for blob in (config_blob, manifest_blob, layer):
        entries[f"blobs/{_digest(blob).replace(':', '/')}"] = blob
    with tarfile.open(target, "w") as tar:
        for name, content in entries.items():
            entry = _entry(name, tarfile.REGTYPE, 0o644)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
