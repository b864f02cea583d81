"""`open_checkpoint`: from a path to a validated checkpoint, whatever kind of model lies there.

Called when a model is loaded. Pickle files are refused by name, never opened.
"""

from __future__ import annotations

from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.weights.gguf_checkpoint import gguf_checkpoint
from naru_worker.adapters.weights.gguf_file import GgufFile
from naru_worker.adapters.weights.hf_checkpoint import hf_checkpoint
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.adapters.weights.model_folder import PICKLE_SUFFIXES, refuse_pickle


def open_checkpoint(path: Path) -> MappedCheckpoint:
    """Opens a GGUF file, a folder with config.json and safetensors, or a folder with one GGUF file.

    Raises:
        LoadError: nothing servable is there, or a file is broken; names file and field.
    """
    gguf = find_gguf(path)
    if gguf is None:
        return hf_checkpoint(path)
    file = GgufFile(gguf)
    try:
        return gguf_checkpoint(file)
    except LoadError:
        file.close()
        raise


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at the path, or None when it is a Hugging Face folder.

    Raises:
        LoadError: it is neither.
    """
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as e:
        raise LoadError(f"{path}: cannot be looked at ({e.strerror})", param="path") from e
    if is_folder:
        return _find_in_folder(path)
    if not exists:
        raise LoadError(f"{path}: does not exist; a GGUF file or a model folder is needed", param="path")
    if path.suffix in PICKLE_SUFFIXES:
        refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: is one part of a model; give the folder that also holds config.json", param="path")
    return path


def _find_in_folder(folder: Path) -> Path | None:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as e:
        raise LoadError(f"{folder}: cannot be listed ({e.strerror})", param="path") from e
    safetensors = [name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if safetensors and "config.json" in names:
        return None
    if len(ggufs) == 1:
        return folder / ggufs[0]
    if ggufs:
        raise LoadError(
            f"{folder}: has {len(ggufs)} GGUF files ({', '.join(ggufs[:4])}); name one of them", param="path"
        )
    for name in names:
        if name.endswith(PICKLE_SUFFIXES):
            refuse_pickle(folder / name)
    missing = "config.json" if safetensors else "weights (*.safetensors or *.gguf)"
    raise LoadError(f"{folder}: has no {missing}; a GGUF file or a Hugging Face folder is needed", param="path")
