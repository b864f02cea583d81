"""Models that already lie on this machine (``file://``). Called by the fetcher; copies nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.model import FetchedModel
from naru_worker.adapters.fetch.uri import PICKLE_SUFFIXES, LocalUri


def find_local(uri: LocalUri) -> FetchedModel:
    """The file or folder itself; a folder with one GGUF and no safetensors stands for that file.

    Raises:
        LoadError: not there, not readable, pickles only, or no model.
    """
    path = Path(uri.path)
    try:
        if path.is_dir():
            return _folder(path)
        if not path.is_file():
            raise LoadError(f"{uri.path!r} does not exist; check the path, seen from the worker", param="model.uri")
        if path.suffix.lower() == ".safetensors":
            raise _bad(path, "a lone .safetensors file lacks its config and tokenizer", "give the folder that holds it")
        if path.suffix.lower() != ".gguf":
            raise _refusal(path, [path.name])
        return FetchedModel(path, _stat_digest([path]))
    except OSError as exc:
        raise _bad(path, exc.strerror or str(exc), "make it readable for this user") from exc


def _folder(path: Path) -> FetchedModel:
    names = sorted(child.name for child in path.iterdir() if child.is_file())
    if any(name.endswith(".safetensors") for name in names):
        return FetchedModel(path, _stat_digest([path / name for name in names]))
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return FetchedModel(path / ggufs[0], _stat_digest([path / ggufs[0]]))
    if ggufs:
        raise _bad(path, f"it holds {len(ggufs)} GGUF files ({', '.join(ggufs[:8])})", "give the path of one")
    raise _refusal(path, names)


def _bad(path: Path, why: str, remedy: str) -> LoadError:
    return LoadError(f"{str(path)!r}: {why}; {remedy}", param="model.uri")


def _refusal(path: Path, names: list[str]) -> LoadError:
    if any(name.lower().endswith(PICKLE_SUFFIXES) for name in names):
        return _bad(path, "a pickle runs code when it is read", "convert it to safetensors or GGUF")
    return _bad(path, "it is no .gguf file and no folder with .safetensors files", "check the path")


def _stat_digest(files: list[Path]) -> str:
    """Identity without reading the bytes: name, size and time of change; a touched file counts as another one."""
    hasher = hashlib.sha256()
    for file in files:
        stat = file.stat()
        hasher.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return f"stat:{hasher.hexdigest()}"
