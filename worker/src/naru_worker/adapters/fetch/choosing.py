"""Which files of a source are the model. Called by the schemes; knows names only. Pickles are never chosen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.uri import PICKLE_SUFFIXES

TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""What belongs to safetensors: configuration, tokenizer, chat template."""
_MAX_SHOWN = 8


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
        return [wanted]
    top = [path for path in paths if len(PurePosixPath(path).parts) == 1 and "\\" not in path]
    weights = [path for path in top if path.endswith(".safetensors")]
    if weights:
        return weights + [path for path in top if path.endswith(TEXT_SUFFIXES)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise LoadError(f"{label}: holds several GGUF files; name one as {address}/FILE: {_some(ggufs)}")
    if any(path.lower().endswith(PICKLE_SUFFIXES) for path in paths):
        raise LoadError(f"{label}: holds pickles only, which run code when read; use one with safetensors or GGUF")
    raise LoadError(f"{label}: holds no .safetensors and no .gguf file; it is no model that can be served")


def pick_model(names: Iterable[str], wanted: str, label: str) -> tuple[str, list[str]]:
    """Chooses the model of a package or an artifact: (entry, files); entry is a GGUF's path or a safetensors folder's.

    Raises:
        LoadError: none, several, or pickles only.
    """
    names = sorted(names)
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if wanted:
        if wanted not in ggufs:
            raise LoadError(f"{label}: has no file {wanted!r}; it has {_some(ggufs)}")
        return wanted, [wanted]
    folders = sorted({str(PurePosixPath(n).parent) for n in names if n.lower().endswith(".safetensors")})
    if len(ggufs) + len(folders) > 1:
        raise LoadError(f"{label}: holds several models ({_some(ggufs + folders)}); name one .gguf after a slash")
    if ggufs:
        return ggufs[0], ggufs
    if folders:
        inside = [n for n in names if str(PurePosixPath(n).parent) == folders[0] and is_model_part(n)]
        return folders[0], inside
    if any(name.lower().endswith(PICKLE_SUFFIXES) for name in names):
        raise LoadError(f"{label}: holds pickles only, which run code when read; convert them to safetensors or GGUF")
    raise LoadError(f"{label}: holds no .gguf and no .safetensors file; it is no model that can be served")


def is_model_part(name: str) -> bool:
    """Whether the name is one of safetensors, configuration, tokenizer or chat template."""
    return name.lower().endswith((".safetensors", *TEXT_SUFFIXES))


def is_model_file(name: str) -> bool:
    """Whether the name is that of a file which a model may consist of."""
    return is_model_part(name) or name.lower().endswith(".gguf")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_SHOWN]) or "none"
    return shown if len(names) <= _MAX_SHOWN else f"{shown}, and {len(names) - _MAX_SHOWN} more"
