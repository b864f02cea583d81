"""Whether a model's files are on this machine, without asking any source. Called for models that are only known.

What it finds is not kept from eviction, and does not count as used.
"""

from __future__ import annotations

import os
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, default_home
from naru_worker.adapters.fetch.credentials import Credentials, read_credentials
from naru_worker.adapters.fetch.fetcher import DEFAULT_SETTINGS, find_or_fetch
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress
from naru_worker.adapters.fetch.uri import ClaimUri, LocalUri, parse_uri
from naru_worker.settings import FetchSettings


class _NotHere(Exception):
    """A fetch would have asked its source now."""


class _LookedAt(CacheEntry):
    """A cache entry that is read as it lies there: no lock is taken, no use noted."""

    def open(self) -> FetchedModel | None:
        """The entry, or None."""
        return self.load()


class _Look(FetchJob):
    """A job that only looks."""

    def entry(self, scheme: str, *parts: str) -> CacheEntry:
        """As the job's, to be looked at."""
        # By name: a dataclass with slots is made anew, and `super()` would mean the old one.
        return _LookedAt(FetchJob.entry(self, scheme, *parts).folder)


def peek(
    uri: str,
    revision: str = "",
    home: Path | None = None,
    *,
    credentials: str = "",
    settings: FetchSettings = DEFAULT_SETTINGS,
) -> int | None:
    """Bytes of the model's files on this machine; None: they are not here, or cannot be served. Blocks on the disk."""
    try:
        parsed = parse_uri(uri, revision)
        own = Credentials()
        if not isinstance(parsed, LocalUri | ClaimUri):
            own = read_credentials(credentials, Path(settings.credentials_dir))
        look = _Look(home or default_home(), _refuse, own.environ(os.environ), own, settings, False)
        return _num_bytes(find_or_fetch(parsed, look).path)
    except (LoadError, _NotHere, OSError):
        return None


def _refuse(progress: FetchProgress) -> None:
    """Every scheme tells of itself before it asks its source."""
    raise _NotHere(progress.phase)


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
