"""Builds wheels for fetch tests, sound and hostile ones."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

GGUF = b"GGUF" + bytes(range(256)) * 40


def wheel_bytes(
    files: dict[str, bytes], *, name: str = "tiny_model", version: str = "1.0", record: dict[str, str] | None = None
) -> bytes:
    """A wheel with the files and a RECORD; `record` replaces the hash of single files."""
    rows = []
    for path, body in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={(record or {}).get(path, digest)},{len(body)}")
    info = f"{name}-{version}.dist-info"
    rows.append(f"{info}/RECORD,,")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path, body in files.items():
            bundle.writestr(path, body)
        bundle.writestr(f"{info}/METADATA", f"Name: {name}\nVersion: {version}\n")
        bundle.writestr(f"{info}/RECORD", "\n".join(rows) + "\n")
    return out.getvalue()


def sha256(body: bytes) -> str:
    """Hex."""
    return hashlib.sha256(body).hexdigest()
