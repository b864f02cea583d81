"""Model files by URI: found on this machine or fetched, verified and cached."""

from naru_worker.adapters.fetch.fetcher import fetch
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress

__all__ = ["FetchProgress", "FetchedModel", "OnProgress", "fetch"]
