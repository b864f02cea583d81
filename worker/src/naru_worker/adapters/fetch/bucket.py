"""Models of object stores (``s3://``, ``gs://``). Called by the fetcher.

What a folder held is resolved once to a list of objects with their ETags; the entry in the cache is named by it. So a
part file never meets another content, and an object that is overwritten meanwhile is noticed at its next range.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import transport
from naru_worker.adapters.fetch.cache import CacheEntry, read_ref, write_ref, writing
from naru_worker.adapters.fetch.choosing import choose_files, entry_name, flat_path
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, byte_reporter, shifted
from naru_worker.adapters.fetch.object_store import Changed, ObjectReader, StoredObject, open_readers
from naru_worker.adapters.fetch.transport import AccessRefused, Broken, open_client
from naru_worker.adapters.fetch.uri import BucketUri
from naru_worker.adapters.fetch.wheel import record_digest

RANGE_BYTES = 8 << 20
_MAX_STALLS = 4
"""Tries in a row that brought no byte; each is preceded by a longer pause."""
_MAX_LISTINGS = 3
"""A folder that is being written changes under each of them."""
_IDENTITY = re.compile(r"[0-9a-f]{40}")
_PLAIN_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class _WrongBytes(Exception):
    """What arrived is not the object."""


def fetch_objects(uri: BucketUri, job: FetchJob) -> FetchedModel:
    """The safetensors of a folder with config and tokenizer, or its GGUF or ONNX model, or the one named.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    ref_name = hashlib.sha256(f"{_endpoint(job)}\0{uri.path}\0{uri.version}".encode()).hexdigest()[:40]
    ref = job.entry(uri.scheme, uri.bucket, "refs", ref_name).folder
    known = read_ref(ref)
    if not job.refresh and _IDENTITY.fullmatch(known):
        ready = job.entry(uri.scheme, uri.bucket, known).open()
        if ready is not None:
            return ready
    for _ in range(_MAX_LISTINGS):
        job.on_progress(FetchProgress("resolving", detail=uri.address))
        reader, listed = _list(uri, job)
        objects = _choose(uri, listed)
        identity = _identity(uri, job, objects)
        entry = job.entry(uri.scheme, uri.bucket, identity)
        with entry.lock(lambda entry=entry: job.waiting(entry, uri.address)):  # type: ignore[misc]
            try:
                ready = entry.open() or _download(uri, reader, objects, entry, job)
            except Changed:
                continue
        write_ref(ref, identity)
        return ready
    raise LoadError(f"{uri.address}: changed {_MAX_LISTINGS} times while it was fetched; fetch it when it is complete")


def _endpoint(job: FetchJob) -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL", "STORAGE_EMULATOR_HOST")
    return "\0".join(job.environ.get(name, "") for name in names)


def _list(uri: BucketUri, job: FetchJob) -> tuple[ObjectReader, list[StoredObject]]:
    """The objects, and the first way to log in that may see them."""
    refused: AccessRefused | None = None
    for reader in open_readers(uri, job):
        try:
            return reader, _find(reader, uri, job)
        except AccessRefused as exc:
            refused = refused or exc
        except LoadError as exc:
            # Where a role of the machine was the second try, its absence is no news.
            raise refused or exc from None
    assert refused is not None, "there is at least one way to log in"
    raise refused


def _find(reader: ObjectReader, uri: BucketUri, job: FetchJob) -> list[StoredObject]:
    """Asks again after faults that may pass.

    Raises:
        LoadError: they did not.
    """
    for attempt in range(_MAX_STALLS + 1):
        try:
            return reader.find(uri)
        except Broken as exc:
            if attempt == _MAX_STALLS:
                raise LoadError(f"{uri.address}: no answer ({exc}); check the endpoint and the network") from None
            transport.pause(0.25 * 2**attempt)
            job.on_progress(FetchProgress("resolving", detail=uri.address))
    raise AssertionError("the last attempt returns or raises")


def _choose(uri: BucketUri, listed: list[StoredObject]) -> list[StoredObject]:
    """Those to fetch; names are relative to the folder."""
    if uri.is_object:
        return listed
    start = len(uri.path) + 1 if uri.path else 0
    by_name = {item.path[start:]: item for item in listed}
    if not by_name:
        raise LoadError(f"{uri.address}: not found: it holds no object; check bucket, path and endpoint")
    return [by_name[name] for name in choose_files(by_name, "", uri.address, uri.address)]


def _identity(uri: BucketUri, job: FetchJob, objects: list[StoredObject]) -> str:
    rows = "".join(f"{item.path}\0{item.size_bytes}\0{item.e_tag}\0{item.version}\n" for item in objects)
    return hashlib.sha256(f"{_endpoint(job)}\0{uri.scheme}\n{rows}".encode()).hexdigest()[:40]


def _download(
    uri: BucketUri, reader: ObjectReader, objects: list[StoredObject], entry: CacheEntry, job: FetchJob
) -> FetchedModel:
    total = sum(item.size_bytes for item in objects)
    job.reserve(entry, total, uri.address)
    on_bytes = byte_reporter(job.on_progress, "downloading", uri.address)
    rows, done = [], 0
    for item in objects:
        name = flat_path(item.path[len(uri.path) :], "") if not uri.is_object else PurePosixPath(item.path).name
        target = entry.staging / name
        with writing(entry.folder):
            target.parent.mkdir(exist_ok=True)
        rows.append((name, _fetch_object(reader, item, target, shifted(on_bytes, done, total), job)))
        done += item.size_bytes
    name = entry_name([name for name, _ in rows], "")
    return entry.commit(
        entry=name,
        digest=record_digest(rows),
        revision=objects[0].version if name and objects[0].version else entry.folder.name,
    )


def _fetch_object(
    reader: ObjectReader, item: StoredObject, target: Path, on_bytes: Callable[[int, int], None], job: FetchJob
) -> str:
    """Brings one object to ``target``, going on from an earlier try's part file; its sha256.

    Raises:
        Changed: the object was overwritten or deleted meanwhile.
        LoadError: forbidden, store or disk at fault, or the checksum differs twice.
    """
    label = f"{reader.label}/{item.path}"
    part = target.with_name(target.name + ".part")
    if target.is_file() and target.stat().st_size == item.size_bytes:
        with writing(target):
            target.rename(part)  # complete, and verified once more below
    stalls, started_over = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            sha256, md5 = _transfer(reader, item, part, on_bytes, job.settings.max_fetch_ranges)
            _verify(reader, item, md5, job)
            break
        except Broken as exc:
            after = part.stat().st_size if part.exists() else 0
            stalls = 0 if after > before else stalls + 1
            if stalls > _MAX_STALLS:
                raise LoadError(f"{label}: {exc}; check the network and run it again, it goes on from there") from None
            transport.pause(0.25 * 2**stalls)
        except _WrongBytes as exc:
            part.unlink(missing_ok=True)
            if started_over:
                raise LoadError(f"{label}: {exc}; it was thrown away, upload the object again") from None
            started_over = True
    with writing(target):
        part.rename(target)
    return sha256


def _transfer(
    reader: ObjectReader, item: StoredObject, part: Path, on_bytes: Callable[[int, int], None], max_ranges: int
) -> tuple[str, str]:
    """Completes the part file, whose length says what is there; its sha256 and md5."""
    hashes = (hashlib.sha256(), hashlib.md5(usedforsecurity=False))
    with writing(part), part.open("a+b") as out:
        if out.tell() > item.size_bytes:
            out.truncate(item.size_bytes)
        out.seek(0)
        while block := out.read(1 << 20):
            for hasher in hashes:
                hasher.update(block)
        start = done = out.tell()
    on_bytes(done, item.size_bytes)
    with part.open("ab", buffering=0) as out, ThreadPoolExecutor(max_ranges, "fetch-range") as pool:
        asked: deque[Future[memoryview]] = deque()
        try:
            while asked or start < item.size_bytes:
                while start < item.size_bytes and len(asked) < max_ranges:
                    stop = min(start + RANGE_BYTES, item.size_bytes)
                    asked.append(pool.submit(reader.read, item, start, stop))
                    start = stop
                block_view = asked.popleft().result()
                with writing(part):
                    _write_all(out.fileno(), block_view)
                for hasher in hashes:
                    hasher.update(block_view)
                done += len(block_view)
                on_bytes(done, item.size_bytes)
            with writing(part):
                os.fsync(out.fileno())
        finally:
            for future in asked:
                future.cancel()
    return hashes[0].hexdigest(), hashes[1].hexdigest()


def _write_all(descriptor: int, block: memoryview) -> None:
    while block:
        block = block[os.write(descriptor, block) :]


def _verify(reader: ObjectReader, item: StoredObject, md5: str, job: FetchJob) -> None:
    """Compares with the ETag where it is an MD5: not of uploads in parts, nor of what a key of the user encrypts."""
    match = _PLAIN_MD5.fullmatch(item.e_tag)
    if match is None or match[1] == md5 or _has_own_key(reader, item, job):
        return
    raise _WrongBytes(f"its md5 is {md5}, the store says {match[1]}")


def _has_own_key(reader: ObjectReader, item: StoredObject, job: FetchJob) -> bool:
    """What the object's headers say of its encryption; asked only when the sums differ."""
    import httpx

    if not (url := reader.signed_url(item.path)):
        return False
    try:
        with open_client(job.environ, job.settings.fetch_stall_timeout_s) as client:
            headers = client.head(url, follow_redirects=False).headers
    except httpx.HTTPError:
        return False
    marks = ("x-amz-server-side-encryption-customer-algorithm", "x-goog-encryption-kms-key-name")
    kind = str(headers.get("x-amz-server-side-encryption", ""))
    return kind.startswith("aws:kms") or any(mark in headers for mark in marks)
