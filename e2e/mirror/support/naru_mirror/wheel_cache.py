"""Wheels downloaded once from the package index of this machine. Called by the command.

The download is the worker's own, so the index's hash is checked.
"""

from __future__ import annotations

import os
from pathlib import Path

from naru_mirror.catalog import canonical_name
from naru_proto.errors import LoadError


class WheelCacheError(Exception):
    """A wheel is not in the cache and could not be downloaded."""


def default_cache() -> Path:
    """Below ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "naru" / "cluster" / "wheels"


def cached_wheel(package: str, cache: Path) -> Path:
    """The wheel of ``NAME`` or ``NAME==VERSION``; of several in the cache the one that sorts last.

    Raises:
        WheelCacheError: it is not there and no index gives it.
    """
    name, _, version = package.partition("==")
    prefix = canonical_name(name).replace("-", "_")
    if found := sorted(cache.glob(f"{prefix}-{version or '*'}-*.whl")):
        return found[-1]
    return _download(canonical_name(name), version, cache)


def _download(name: str, version: str, cache: Path) -> Path:
    from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
    from naru_worker.adapters.fetch.package_index import find_wheel, index_url
    from naru_worker.adapters.fetch.transport import open_client

    try:
        with open_client() as client:
            wheel = find_wheel(client, index_url(), name, version)
            if not wheel.sha256:
                raise WheelCacheError(f"package {name!r}: the index states no sha256 for {wheel.filename}")
            remote = RemoteFile(wheel.url, wheel.filename, wheel.size_bytes, Checksum("sha256", wheel.sha256))
            cache.mkdir(parents=True, exist_ok=True)
            download(client, remote, cache / wheel.filename, lambda done, total: None)
    except LoadError as exc:
        raise WheelCacheError(f"package {name!r} is not in {str(cache)!r} and cannot be downloaded: {exc}") from exc
    return cache / wheel.filename
