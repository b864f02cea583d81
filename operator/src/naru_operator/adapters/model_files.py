"""A model to plan for, from what a user wrote: a known name, a folder, a GGUF file or a manifest.

Files are read by the worker's own reader, in a process of its own: what it refuses to serve cannot be planned.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from naru_operator.core.roofline.models import MODELS, Model
from naru_proto.errors import InternalError, InvalidRequest
from naru_proto.model_uri import parse_model_uri
from naru_proto.shapes import ModelShape

_MANIFESTS = (".yaml", ".yml")
_LOCAL = "file"


def find_model(text: str) -> Model:
    """The model that `text` means.

    Raises:
        InvalidRequest: it means none, or what is there is no model that is known.
        InternalError: the reader ended without an answer.
    """
    known = MODELS.get(text.lower())
    if known is not None:
        return known
    if "://" in text:
        return _read(_local_path(text))
    path = Path(text)
    if not path.exists():
        raise InvalidRequest(
            f"{text!r} is no file or folder and no known model: give a GGUF file, a folder with config.json, "
            f"a manifest, or one of {', '.join(MODELS)}",
            param="model",
        )
    if path.suffix in _MANIFESTS:
        return _of_manifest(path)
    return _read(path)


def _of_manifest(path: Path) -> Model:
    from naru_operator.adapters.manifest_files import read_manifests
    from naru_proto.crd.v1alpha1 import ModelDeployment

    models = [manifest for manifest in read_manifests([path]) if isinstance(manifest, ModelDeployment)]
    if len(models) != 1:
        raise InvalidRequest(f"{path} has {len(models)} ModelDeployments: give a file with one", param="model")
    return _read(_local_path(models[0].spec.model.uri))


def _local_path(uri: str) -> Path:
    parsed = parse_model_uri(uri)
    if parsed.scheme != _LOCAL:
        raise InvalidRequest(
            f"the files of {uri} may be elsewhere: fetch them with `naru pull {uri}` and give the path that it prints",
            param="model",
        )
    return Path(parsed.location)


def _read(path: Path) -> Model:
    argv = [sys.executable, "-m", "naru_worker.adapters.weights", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InternalError(f"{path} could not be read: the worker's reader ended with {last!r}") from None
    if "error" in found:
        raise InvalidRequest(str(found["message"]), param="model")
    return Model(
        name=path.name,
        shape=ModelShape(**found["shape"]),
        max_context=int(found["max_context"]),
        windows=tuple(found["windows"]),
        weights=str(found["weights"]),
    )
