"""What kind of model a folder or file holds, told from names and config alone. Called when a model is prepared.

Every kind has its own way to be prepared; from there on all are the same to the hub. What is no model at all is found
out by the way it takes.
"""

from __future__ import annotations

import enum
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.onnx.repository import is_onnx
from naru_worker.adapters.weights.model_folder import read_json_object
from naru_worker.core.encoder_config import ENCODER_MODEL_TYPES


class Kind(enum.Enum):
    """How a model is loaded and what its engine does."""

    DECODER = "decoder"
    """It generates text."""
    ENCODER = "encoder"
    """It gives texts a vector or a score."""
    ONNX = "onnx"
    """It takes tensors and gives tensors."""


def kind_of(path: Path) -> Kind:
    """The kind of what lies at `path`.

    Raises:
        LoadError: it cannot be looked at, or its config.json is no JSON object.
    """
    try:
        if is_onnx(path):
            return Kind.ONNX
        config = read_json_object(path / "config.json") if path.is_dir() else None
    except OSError as exc:
        raise LoadError(f"{path}: cannot be looked at ({exc.strerror})", param="path") from exc
    if config is not None and config.get("model_type") in ENCODER_MODEL_TYPES:
        return Kind.ENCODER
    return Kind.DECODER
