"""Keeps what a long prompt leaves in a llama-server slot on disk, so that a later run brings it back in a second.

Only for the unmeasured prompt before `decode8k`: to compute 8000 tokens takes llama.cpp minutes, and what is measured
after it is the same. Called by `measure`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from pathlib import Path

from bench.servers import ServerSpec

_TIMEOUT_S = 60.0


def slot_file(spec: ServerSpec, text: str) -> Path:
    """Where the state after `text` is kept. Another model, version, library or setting has another file."""
    assert spec.slots_folder is not None
    model = Path(spec.argv[spec.argv.index("--model") + 1])
    facts = [spec.version, spec.settings, spec.library, model.name, str(model.stat().st_size), text]
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return spec.slots_folder / f"{digest}.slot"


def restored(spec: ServerSpec, text: str) -> bool:
    """Brings the state after `text` into the server's first slot; False where there is none, or it was refused."""
    if spec.slots_folder is None or not (file := slot_file(spec, text)).is_file():
        return False
    if _ask(spec.port, "restore", file.name):
        return True
    file.unlink(missing_ok=True)
    return False


def keep(spec: ServerSpec, text: str) -> None:
    """Writes the state of the first slot; a state that could not be written whole leaves no file."""
    if spec.slots_folder is None:
        return
    file = slot_file(spec, text)
    partial = file.with_suffix(".partial")
    if _ask(spec.port, "save", partial.name):
        os.replace(partial, file)
    else:
        partial.unlink(missing_ok=True)


def _ask(port: int, action: str, name: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        body = json.dumps({"filename": name})
        connection.request("POST", f"/slots/0?action={action}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
