"""Manifest files to models: finds the files, parses YAML safely, collects everything that is wrong with them.

Called by `naru up`. Folders are read flat, in name order, as `kubectl apply -f` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from naru_proto.crd.manifests import Manifest, find_collisions, load_manifests
from naru_proto.crd.v1alpha1 import InvalidManifest, Problem
from naru_proto.errors import InvalidRequest
from naru_proto.yaml_text import BadYaml, load_yaml

SUFFIXES = (".yaml", ".yml", ".json")
_MAX_FILE_BYTES = 1 << 20
"""What the API server takes at most, too."""
_DEBOUNCE_MS = 200
"""Editors write, rename and touch in a burst."""
_STEP_MS = 200
"""Between two looks of the library at what the system has told it: each wakes the process."""


def read_manifests(paths: Iterable[Path]) -> list[Manifest]:
    """All manifests of the files and folders given, in order.

    Raises:
        InvalidManifest: with every problem of every file.
    """
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    for file in _files(paths, problems):
        try:
            manifests += load_manifests(_documents(file), str(file))
        except InvalidManifest as exc:
            problems += exc.problems
        except _Unreadable as exc:
            problems.append(Problem(str(file), "", str(exc)))
    if not problems:
        problems += find_collisions(manifests, "all files together")
    if problems:
        raise InvalidManifest(problems)
    return manifests


async def manifest_changes(paths: Iterable[Path]) -> AsyncIterator[None]:
    """One item for every burst of changes to the files that `read_manifests` would read.

    Watches folders, not files: an editor that saves by renaming replaces the file.

    Raises:
        InvalidRequest: the system cannot watch them.
    """
    import watchfiles

    roots = [path.absolute() for path in paths]
    folders = {root if root.is_dir() else root.parent for root in roots}

    try:
        async for _ in watchfiles.awatch(
            *folders,
            watch_filter=lambda _, changed: is_ours(roots, Path(changed)),
            debounce=_DEBOUNCE_MS,
            step=_STEP_MS,
            recursive=False,
        ):
            yield
    except (OSError, RuntimeError) as exc:
        raise InvalidRequest(f"manifests cannot be watched ({exc}); edits take effect at the next start only") from exc


def is_ours(roots: list[Path], changed: Path) -> bool:
    """Whether a changed file is one that `read_manifests` would read for these files and folders."""
    return changed in roots or (changed.parent in roots and changed.suffix in SUFFIXES)


class _Unreadable(Exception):
    """A file that is no YAML we take."""


def _files(paths: Iterable[Path], problems: list[Problem]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        try:
            if path.is_dir():
                inside = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
                if not inside:
                    problems.append(Problem(str(path), "", f"the folder has no {', '.join(SUFFIXES)} file: add one"))
                found |= dict.fromkeys(inside)
            elif path.is_file():
                found[path] = None
            else:
                problems.append(Problem(str(path), "", "there is no such file or folder: check the path"))
        except OSError as exc:
            problems.append(Problem(str(path), "", f"cannot be read: {exc.strerror}"))
    return list(found)


def _documents(file: Path) -> list[object]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise _Unreadable(f"cannot be read: {exc.strerror}") from exc
    if len(data) > _MAX_FILE_BYTES:
        raise _Unreadable(f"is larger than {_MAX_FILE_BYTES} bytes: it is no manifest")
    try:
        return load_yaml(data)
    except BadYaml as exc:
        raise _Unreadable(str(exc)) from exc
