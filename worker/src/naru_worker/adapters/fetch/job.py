"""One fetch: where it may write, whose credentials it uses, whom it tells. Handed by the fetcher to the schemes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from naru_worker.adapters.fetch.budget import CacheBudget
from naru_worker.adapters.fetch.cache import CacheEntry, cache_entry
from naru_worker.adapters.fetch.credentials import Credentials
from naru_worker.adapters.fetch.model import FetchProgress, OnProgress
from naru_worker.settings import FetchSettings

_SCOPE = "with"
"""Folder of what was fetched with named credentials; no scheme has this name."""


@dataclass(frozen=True, slots=True)
class FetchJob:
    """What is fetched with named credentials lies apart: only a fetch with the same ones finds it in the cache."""

    home: Path
    on_progress: OnProgress
    environ: Mapping[str, str]
    credentials: Credentials
    settings: FetchSettings
    refresh: bool
    """Look for a newer one although something is cached."""

    def entry(self, scheme: str, *parts: str) -> CacheEntry:
        """A cache entry for these credentials; see `cache_entry`."""
        if self.credentials.name:
            return cache_entry(self.home, _SCOPE, self.credentials.name, scheme, *parts)
        return cache_entry(self.home, scheme, *parts)

    def waiting(self, entry: CacheEntry, what: str) -> None:
        """Tells how far another fetch of the same entry is."""
        done = 0
        with contextlib.suppress(OSError):  # it may just be finished
            done = sum(path.stat().st_size for path in entry.staging.rglob("*") if path.is_file())
        self.on_progress(FetchProgress("waiting", done, 0, what))

    def reserve(self, entry: CacheEntry, needed_bytes: int, what: str) -> None:
        """Takes room for an entry; its lock is held.

        Raises:
            LoadError: there is none; names the sizes.
        """
        budget = CacheBudget(self.home, self.settings.cache_budget_bytes)
        budget.reserve(entry, needed_bytes, what, lambda: self.on_progress(FetchProgress("waiting", detail=what)))
