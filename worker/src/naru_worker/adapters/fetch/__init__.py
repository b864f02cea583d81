"""Model files by URI: found on this machine or fetched, verified and cached."""

from naru_worker.adapters.fetch.fetcher import DEFAULT_SETTINGS, fetch
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress
from naru_worker.adapters.fetch.peek import peek

__all__ = ["DEFAULT_SETTINGS", "FetchProgress", "FetchedModel", "OnProgress", "fetch", "peek"]
