"""A real OCI registry as a process, and what pushes artifacts to it. Go builds it once, from `registry_server`.

Source: OCI distribution specification 1.1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

SOURCE = Path(__file__).parents[1] / "registry_server"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
USER, PASSWORD = "reader", "pa55word-of-the-registry"


def registry_binary() -> Path:
    """The built registry; skips where there is no Go, and fails in CI where Go is there and does not build it."""
    go = shutil.which("go") or "/usr/local/go/bin/go"
    key = hashlib.sha256(b"".join((SOURCE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum")))
    folder = Path.home() / ".cache" / "naru" / "test-tools"
    binary = folder / f"oci-registry-{key.hexdigest()[:16]}"
    if binary.exists():
        return binary
    if not Path(go).exists():
        pytest.skip("no Go here to build the OCI registry with")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "oci-registry.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            staged = binary.with_suffix(".new")
            command = [go, "build", "-C", str(SOURCE), "-o", str(staged), "."]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                if os.environ.get("CI"):
                    pytest.fail(f"the OCI registry does not build: {done.stderr[-2000:]}")
                pytest.skip(f"the OCI registry does not build here: {done.stderr[-300:]}")
            staged.rename(binary)
    return binary


class Registry:
    """A running registry and a client that pushes to it."""

    def __init__(self, host: str, account: tuple[str, str] | None) -> None:
        self.host = host
        self._client = httpx.Client(base_url=f"http://{host}", auth=account)

    def close(self) -> None:
        """Ends the client."""
        self._client.close()

    def put_blob(self, repository: str, body: bytes) -> str:
        """Uploads a blob in one piece; its digest."""
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        begun = self._client.post(f"/v2/{repository}/blobs/uploads/")
        location = begun.headers["Location"]
        glue = "&" if "?" in location else "?"
        done = self._client.put(f"{location}{glue}digest={digest}", content=body)
        assert done.status_code == 201, done.text
        return digest

    def put_manifest(self, repository: str, reference: str, manifest: dict[str, Any]) -> str:
        """Uploads a manifest or index; its digest."""
        body = json.dumps(manifest).encode()
        headers = {"Content-Type": manifest["mediaType"]}
        done = self._client.put(f"/v2/{repository}/manifests/{reference}", content=body, headers=headers)
        assert done.status_code == 201, done.text
        return f"sha256:{hashlib.sha256(body).hexdigest()}"

    def push(
        self,
        repository: str,
        tag: str,
        layers: list[tuple[str, str, bytes]],
        config_type: str = "application/vnd.oci.empty.v1+json",
    ) -> str:
        """Pushes layers of (media type, title, content) as one artifact; the manifest's digest."""
        config = b"{}"
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": config_type, "digest": self.put_blob(repository, config), "size": len(config)},
            "layers": [layer(self.put_blob(repository, body), body, kind, title) for kind, title, body in layers],
        }
        return self.put_manifest(repository, tag, manifest)


def layer(digest: str, body: bytes, media_type: str, title: str = "") -> dict[str, Any]:
    """A layer's descriptor."""
    item: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": len(body)}
    if title:
        item["annotations"] = {"org.opencontainers.image.title": title}
    return item


@contextlib.contextmanager
def oci_registry(*, with_password: bool = False) -> Iterator[Registry]:
    """A registry on a free loopback port while the context lasts."""
    command = [str(registry_binary())]
    if with_password:
        command += ["-user", USER, "-password", PASSWORD]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        host = process.stdout.readline().strip()
        assert host, f"the registry does not come up: {process.wait(30)}"
        registry = Registry(host, (USER, PASSWORD) if with_password else None)
        try:
            yield registry
        finally:
            registry.close()
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
