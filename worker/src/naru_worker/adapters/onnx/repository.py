"""Which files of a folder are an ONNX model: a file, a folder that holds one, or the layout of Triton with versions.

    model.onnx                          folder/model.onnx (and its external data beside it)
    folder/config.pbtxt                 folder/1/model.onnx, folder/2/model.onnx: the highest number is served

Called when a model is prepared. Reads names only.
"""

from __future__ import annotations

from pathlib import Path

from naru_proto.errors import LoadError

SUFFIX = ".onnx"
CONFIG_NAME = "config.pbtxt"
DEFAULT_NAME = "model.onnx"
MAX_VERSIONS = 10_000


def is_onnx(path: Path) -> bool:
    """Whether this is an ONNX model and nothing else that is served; raises OSError where it cannot be looked at."""
    if not path.is_dir():
        return path.suffix.lower() == SUFFIX
    children = sorted(path.iterdir())
    if any(child.suffix.lower() in (".safetensors", ".gguf") for child in children):
        return False
    return any(child.name == CONFIG_NAME or child.suffix.lower() == SUFFIX for child in children) or any(
        (child / DEFAULT_NAME).exists() for child in children if _number(child.name) is not None
    )


def versions_of(folder: Path) -> dict[int, Path]:
    """The numbered folders of a model in Triton's layout."""
    found = {}
    for child in folder.iterdir():
        number = _number(child.name)
        if number is not None and child.is_dir():
            found[number] = child
            if len(found) > MAX_VERSIONS:
                raise LoadError(f"{folder}: has more than {MAX_VERSIONS} versions; delete old ones", param="path")
    return found


def model_file(path: Path, file_name: str, version: int | None) -> Path:
    """The .onnx file of a model: of this version where there are versions.

    Raises:
        LoadError: there is none, or it is not clear which.
    """
    if path.is_file():
        return path
    folder = path if version is None else versions_of(path)[version]
    named = folder / (file_name or DEFAULT_NAME)
    if named.is_file():
        return named
    if file_name:
        raise LoadError(f"{folder}: has no file {file_name!r}, which {CONFIG_NAME} names", param="path")
    found = sorted(child for child in folder.iterdir() if child.suffix.lower() == SUFFIX and child.is_file())
    if len(found) == 1:
        return found[0]
    names = ", ".join(child.name for child in found[:8])
    what = f"several .onnx files ({names}); name one {DEFAULT_NAME}" if found else f"no {DEFAULT_NAME}"
    raise LoadError(f"{folder}: has {what}", param="path")


def _number(name: str) -> int | None:
    """Versions are written without leading zeros; 0 is none."""
    is_number = name.isascii() and name.isdigit() and not name.startswith("0") and len(name) <= 18
    return int(name) if is_number else None
