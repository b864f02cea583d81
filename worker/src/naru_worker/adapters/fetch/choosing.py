"""Which files of a source are the model. Called by the schemes; knows names only. Pickles are never chosen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.uri import PICKLE_SUFFIXES

ONNX_SUFFIX, ONNX_CONFIG = ".onnx", "config.pbtxt"
_DATA_SUFFIXES = (".data", "_data", ".weights")
"""Of files beside an .onnx file that hold its weights; those that begin with its name are taken, too."""
TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""What belongs to safetensors: configuration, tokenizer, chat template."""
_MAX_SHOWN = 8
_MODULE = re.compile(r"[0-9]{1,3}_[A-Za-z]{1,64}/config\.json")


def choose_files(paths: Iterable[str], wanted: str, label: str, address: str) -> list[str]:
    """Those to fetch: the file that was named, else the safetensors of the top folder with what belongs to them.

    ``address`` is the URI to which a file may be added.

    Raises:
        LoadError: nothing there that may be loaded, or a choice that only the user can make.
    """
    paths = sorted(paths)
    ggufs = [path for path in paths if path.lower().endswith(".gguf")]
    if wanted:
        if wanted not in paths:
            raise LoadError(f"{label}: has no file {wanted!r}; it has {_some(ggufs) if ggufs else 'no .gguf file'}")
        return [wanted, *_data_files(paths, wanted)] if wanted.lower().endswith(ONNX_SUFFIX) else [wanted]
    top = [path for path in paths if len(PurePosixPath(path).parts) == 1 and "\\" not in path]
    weights = [path for path in top if path.endswith(".safetensors")]
    if weights:
        return weights + [path for path in paths if (path in top and path.endswith(TEXT_SUFFIXES)) or is_module(path)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise LoadError(f"{label}: holds several GGUF files; name one as {address}/FILE: {_some(ggufs)}")
    onnx = _onnx_folder(paths, label)
    if onnx:
        return onnx
    if any(path.lower().endswith(PICKLE_SUFFIXES) for path in paths):
        raise LoadError(f"{label}: holds pickles only, which run code when read; use one with safetensors or GGUF")
    raise LoadError(
        f"{label}: holds no .safetensors and no .gguf file, and no .onnx; it is no model that can be served"
    )


def entry_name(paths: list[str], wanted: str) -> str:
    """The file that stands for what was fetched, which lies at these flat paths; empty: their folder does."""
    name = PurePosixPath(wanted).name or (paths[0] if len(paths) == 1 else "")
    return name if "/" not in name and name.lower().endswith((".gguf", ONNX_SUFFIX)) else ""


def flat_path(path: str, wanted: str) -> str:
    """Where a chosen file lies in the cache, from which no path can lead out.

    Versions of an ONNX model and modules of an encoder keep their folder, unless a file was named.
    """
    parts = PurePosixPath(path).parts
    last_two = "/".join(parts[-2:])
    keeps_folder = len(parts) > 1 and not wanted and (_is_version(parts[-2]) or is_module(last_two))
    return last_two if keeps_folder else parts[-1]


def pick_model(names: Iterable[str], wanted: str, label: str) -> tuple[str, list[str]]:
    """Chooses the model of a package or an artifact: (entry, files); entry is a GGUF's path or a safetensors folder's.

    Raises:
        LoadError: none, several, or pickles only.
    """
    names = sorted(names)
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    onnx = [name for name in names if name.lower().endswith(ONNX_SUFFIX)]
    if wanted:
        if wanted not in ggufs + onnx:
            raise LoadError(f"{label}: has no file {wanted!r}; it has {_some(ggufs + onnx)}")
        return wanted, [wanted, *(_data_files(names, wanted) if wanted in onnx else ())]
    folders = sorted({str(PurePosixPath(n).parent) for n in names if n.lower().endswith(".safetensors")})
    if len(ggufs) + len(folders) > 1:
        raise LoadError(f"{label}: holds several models ({_some(ggufs + folders)}); name one .gguf after a slash")
    if ggufs:
        return ggufs[0], ggufs
    if folders:
        inside = [n for n in names if str(PurePosixPath(n).parent) == folders[0] and is_model_part(n)]
        start = "" if folders[0] == "." else f"{folders[0]}/"
        return folders[0], inside + [n for n in names if n.startswith(start) and is_module(n[len(start) :])]
    if len(onnx) == 1:
        return onnx[0], [onnx[0], *_data_files(names, onnx[0])]
    if onnx:
        raise LoadError(f"{label}: holds several models ({_some(onnx)}); name one .onnx after a slash")
    if any(name.lower().endswith(PICKLE_SUFFIXES) for name in names):
        raise LoadError(f"{label}: holds pickles only, which run code when read; convert them to safetensors or GGUF")
    raise LoadError(
        f"{label}: holds no .gguf and no .safetensors file, and no .onnx; it is no model that can be served"
    )


def is_module(path: str) -> bool:
    """Whether the path inside a model's folder is the settings of a module, as sentence-transformers numbers them."""
    return _MODULE.fullmatch(path) is not None


def is_model_part(name: str) -> bool:
    """Whether the name is one of safetensors, configuration, tokenizer or chat template."""
    return name.lower().endswith((".safetensors", *TEXT_SUFFIXES))


def is_model_file(name: str) -> bool:
    """Whether the name is that of a file which a model may consist of."""
    return is_model_part(name) or name.lower().endswith((".gguf", ONNX_SUFFIX, ".onnx_data", ".onnx.data"))


def _onnx_folder(paths: list[str], label: str) -> list[str]:
    """An ONNX model in the top folder, or the highest of its numbered versions, with config and external data."""
    config = [path for path in paths if path == ONNX_CONFIG]
    versions: dict[int, list[str]] = {}
    for path in paths:
        parts = PurePosixPath(path).parts
        if len(parts) == 2 and _is_version(parts[0]) and "\\" not in path:
            versions.setdefault(int(parts[0]), []).append(path)
    served = [number for number, files in versions.items() if any(it.lower().endswith(ONNX_SUFFIX) for it in files)]
    if served:
        return config + versions[max(served)]
    models = [path for path in paths if "/" not in path and path.lower().endswith(ONNX_SUFFIX)]
    named = [path for path in models if path == "model.onnx"] or models
    if len(named) > 1:
        raise LoadError(f"{label}: holds several .onnx files ({_some(named)}); name one of them after a slash")
    return config + named + (_data_files(paths, named[0]) if named else []) if named else []


def _data_files(paths: Iterable[str], model: str) -> list[str]:
    """Files beside an .onnx file that may hold its weights."""
    folder, stem = PurePosixPath(model).parent, PurePosixPath(model).stem
    beside = [path for path in paths if PurePosixPath(path).parent == folder and path != model]
    names = {path: PurePosixPath(path).name for path in beside}
    return [
        path
        for path, name in names.items()
        if not name.lower().endswith((ONNX_SUFFIX, *TEXT_SUFFIXES, ".md"))
        and (name.startswith(f"{stem}.") or name.lower().endswith(_DATA_SUFFIXES))
    ]


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0") and len(name) <= 18


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN]) or "none"
    return shown if len(names) <= _MAX_SHOWN else f"{shown}, and {len(names) - _MAX_SHOWN} more"
