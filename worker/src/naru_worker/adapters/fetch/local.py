"""Models that already lie on this machine (``file://``, ``pvc://``). Called by the fetcher; copies nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.choosing import is_module
from naru_worker.adapters.fetch.model import FetchedModel
from naru_worker.adapters.fetch.uri import PICKLE_SUFFIXES, SINGLE_SUFFIXES, ClaimUri, LocalUri
from naru_worker.adapters.onnx.repository import is_onnx, versions_of


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
        if path.suffix.lower() not in SINGLE_SUFFIXES:
            raise _refusal(path, [path.name])
        return FetchedModel(path, _stat_digest([path]))
    except OSError as exc:
        raise _bad(path, exc.strerror or str(exc), "make it readable for this user") from exc


def find_in_claim(uri: ClaimUri, claims: Path) -> FetchedModel:
    """The file or folder of a claim that is mounted below ``claims``, in place.

    Raises:
        LoadError: not mounted, it leads out of the claim, or see `find_local`.
    """
    root = claims / uri.claim
    if not root.is_dir():
        raise LoadError(
            f"claim {uri.claim!r} is not mounted in this worker ({str(root)!r} does not exist); list it in "
            "WorkerPool.spec.claims, and make the PersistentVolumeClaim in the pool's namespace",
            param="model.uri",
        )
    path = root / uri.path
    if not path.exists():
        raise LoadError(f"claim {uri.claim!r} has no {uri.path!r}; check the path inside the volume", param="model.uri")
    found = find_local(LocalUri(str(path)))
    inside = found.path.rglob("*") if found.path.is_dir() else (found.path,)
    try:
        real_root = root.resolve(strict=True)
        for file in inside:
            if not file.resolve().is_relative_to(real_root):
                raise _bad(file, "it is a link that leads out of the claim", "put the file itself into the volume")
    except (OSError, RuntimeError) as exc:
        raise _bad(path, f"its links cannot be followed ({exc})", "put the files themselves into the volume") from exc
    return found


def _folder(path: Path) -> FetchedModel:
    names = sorted(child.name for child in path.iterdir() if child.is_file())
    if any(name.endswith(".safetensors") for name in names):
        modules = [file for file in sorted(path.glob("*/config.json")) if is_module(f"{file.parent.name}/{file.name}")]
        return FetchedModel(path, _stat_digest([*(path / name for name in names), *modules]))
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return FetchedModel(path / ggufs[0], _stat_digest([path / ggufs[0]]))
    if ggufs:
        raise _bad(path, f"it holds {len(ggufs)} GGUF files ({', '.join(ggufs[:8])})", "give the path of one")
    if is_onnx(path):
        inside = (*path.iterdir(), *(file for folder in versions_of(path).values() for file in folder.iterdir()))
        return FetchedModel(path, _stat_digest(sorted(file for file in inside if file.is_file())))
    raise _refusal(path, names)


def _bad(path: Path, why: str, remedy: str) -> LoadError:
    return LoadError(f"{str(path)!r}: {why}; {remedy}", param="model.uri")


def _refusal(path: Path, names: list[str]) -> LoadError:
    if any(name.lower().endswith(PICKLE_SUFFIXES) for name in names):
        return _bad(path, "a pickle runs code when it is read", "convert it to safetensors or GGUF")
    return _bad(path, "it is no .gguf file, no .onnx file and no folder with .safetensors files", "check the path")


def _stat_digest(files: list[Path]) -> str:
    """Identity without reading the bytes: name, size and time of change; a touched file counts as another one."""
    hasher = hashlib.sha256()
    for file in files:
        stat = file.stat()
        hasher.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return f"stat:{hasher.hexdigest()}"
