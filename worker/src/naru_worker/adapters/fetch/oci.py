"""Models of OCI registries (``oci://``): artifacts, and images with a model inside. Called by the fetcher.

A tag is resolved once to the digest of a manifest, which names every byte below it. Source: OCI distribution
specification 1.1.
"""

from __future__ import annotations

import hashlib
import ipaddress
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.artifact import (
    IMAGE_FOLDER,
    MANIFEST_TYPES,
    MAX_MANIFEST_BYTES,
    Artifact,
    Layer,
    choose_manifest,
    parse_manifest,
    read_artifact,
)
from naru_worker.adapters.fetch.cache import MANIFEST, RESERVED, CacheEntry, read_ref, write_ref, writing
from naru_worker.adapters.fetch.choosing import is_model_file, pick_model
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, byte_reporter, shifted
from naru_worker.adapters.fetch.registry_login import RegistryLogin, find_account
from naru_worker.adapters.fetch.tar_layer import unpack_layer
from naru_worker.adapters.fetch.transport import get_page, open_client
from naru_worker.adapters.fetch.uri import ArtifactUri

if TYPE_CHECKING:
    import httpx

_BLOBS = ".blobs"
"""Folder of archive layers in an entry that is being put together."""
_HEX_CHARS = 64


@dataclass(frozen=True, slots=True)
class _Registry:
    """One repository, and how to ask for it."""

    client: httpx.Client
    login: RegistryLogin
    url: str
    """Up to the repository."""
    label: str

    def manifest(self, reference: str) -> tuple[str, bytes]:
        """Digest and content of a manifest by tag or digest.

        Raises:
            LoadError: not there, forbidden, or another one than was asked for.
        """
        page = get_page(
            self.client, f"{self.url}/manifests/{reference}", self.label,
            headers={"Accept": ", ".join(MANIFEST_TYPES)}, login=self.login, max_bytes=MAX_MANIFEST_BYTES,
        )  # fmt: skip
        digest = f"sha256:{hashlib.sha256(page.content).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise LoadError(f"{self.label}: the registry's manifest has digest {digest}, {reference} was asked for")
        return digest, page.content


def fetch_artifact(uri: ArtifactUri, job: FetchJob) -> FetchedModel:
    """The safetensors of an artifact with config and tokenizer, or its GGUF.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    ref = job.entry("oci", *_shelf(uri), "refs", uri.tag or "none").folder
    known = uri.digest or read_ref(ref)
    if known and not job.refresh and (ready := _entry(uri, job, known).open()) is not None:
        return ready
    job.on_progress(FetchProgress("resolving", detail=uri.address))
    with open_client(job.environ, job.settings.fetch_stall_timeout_s) as client:
        base_url = _base_url(uri.registry, job)
        account = find_account(job, uri.registry, uri.repository)
        login = RegistryLogin(client, base_url, uri.repository, account)
        registry = _Registry(client, login, f"{base_url}/v2/{uri.repository}", uri.address)
        digest, content = registry.manifest(uri.digest or uri.tag)
        entry = _entry(uri, job, digest)
        with entry.lock(lambda: job.waiting(entry, uri.address)):
            ready = entry.open()
            if ready is None:
                ready = _download(uri, registry, _resolve(registry, content), digest, entry, job)
    if not uri.digest:
        write_ref(ref, digest)
    return ready


def _shelf(uri: ArtifactUri) -> tuple[str, str]:
    # A repository's path has no fixed depth, so it becomes one name; no part of it holds a '+'.
    return uri.registry.replace(":", "+"), uri.repository.replace("/", "+")


def _entry(uri: ArtifactUri, job: FetchJob, digest: str) -> CacheEntry:
    leaf = digest.removeprefix("sha256:")
    if len(leaf) != _HEX_CHARS or not leaf.isalnum():
        leaf = "0" * _HEX_CHARS  # a ref that somebody else wrote: no entry has this name
    return job.entry("oci", *_shelf(uri), leaf + (f"--{uri.file.replace('/', '--')}" if uri.file else ""))


def _base_url(registry: str, job: FetchJob) -> str:
    """Without TLS only on loopback, and where the worker's settings say so."""
    host = registry.rpartition(":")[0] if registry.rpartition(":")[2].isdigit() else registry
    is_plain = registry in job.settings.insecure_registries or host in job.settings.insecure_registries
    try:
        is_plain = is_plain or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_plain = is_plain or host == "localhost"
    name = "registry-1.docker.io" if registry in ("docker.io", "index.docker.io") else registry
    return f"{'http' if is_plain else 'https'}://{name}"


def _resolve(registry: _Registry, content: bytes) -> Artifact:
    manifest = parse_manifest(content, registry.label)
    if "manifests" in manifest:
        _, content = registry.manifest(choose_manifest(manifest, platform.machine(), registry.label))
        manifest = parse_manifest(content, registry.label)
        if "layers" not in manifest:
            raise LoadError(f"{registry.label}: an index of indexes; name the manifest by its digest")
    return read_artifact(manifest, registry.label)


def _download(
    uri: ArtifactUri, registry: _Registry, artifact: Artifact, digest: str, entry: CacheEntry, job: FetchJob
) -> FetchedModel:
    layers = _wanted(artifact, uri)
    archives = [layer for layer in layers if layer.form != "file"]
    total = sum(layer.size_bytes for layer in layers)
    job.reserve(entry, total + sum(layer.size_bytes for layer in archives), uri.address)
    _keep_only(entry, {layer.title for layer in layers if layer.form == "file"})
    on_bytes = byte_reporter(job.on_progress, "downloading", uri.address)
    done = 0
    for layer in layers:
        name = layer.title if layer.form == "file" else f"{_BLOBS}/{layer.hexdigest}"
        _fetch_layer(registry, layer, entry.staging / name, shifted(on_bytes, done, total))
        done += layer.size_bytes
    folder = IMAGE_FOLDER if artifact.is_image else ""
    on_unpacked = byte_reporter(job.on_progress, "extracting", uri.address)
    for layer in archives:
        blob = entry.staging / _BLOBS / layer.hexdigest
        unpack_layer(blob, layer.form, folder, entry.staging, uri.address, _unsized(on_unpacked))
    found = _prune(entry, uri, artifact)
    return entry.commit(entry="" if found == "." else found, digest=digest, revision=digest)


def _unsized(on_bytes: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda done: on_bytes(done, 0)


def _wanted(artifact: Artifact, uri: ArtifactUri) -> list[Layer]:
    """What must be downloaded: named files can be chosen before, archives must be opened first."""
    if any(layer.form != "file" for layer in artifact.layers):
        return [layer for layer in artifact.layers if layer.form != "file" or is_model_file(layer.title)]
    by_title = {layer.title: layer for layer in artifact.layers}
    _, names = pick_model(by_title, uri.file, uri.address)
    return [by_title[name] for name in names]


def _fetch_layer(registry: _Registry, layer: Layer, target: Path, on_bytes: Callable[[int, int], None]) -> None:
    if target.is_file() and target.stat().st_size == layer.size_bytes:
        return  # it got its name when it was verified
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    label = f"{registry.label} layer {layer.title or layer.digest[:19]}"
    remote = RemoteFile(
        f"{registry.url}/blobs/{layer.digest}", label, layer.size_bytes, Checksum("sha256", layer.hexdigest)
    )
    download(registry.client, remote, target, on_bytes, login=registry.login)


def _keep_only(entry: CacheEntry, titles: set[str]) -> None:
    """Removes what an interrupted unpacking left; downloads of layers stay."""
    kept = {name for title in titles for name in (title, f"{title}.part")} | {RESERVED}
    with writing(entry.folder):
        for path in sorted(entry.staging.rglob("*")):
            name = str(path.relative_to(entry.staging))
            if path.is_file() and name not in kept and not name.startswith(f"{_BLOBS}/"):
                path.unlink()


def _prune(entry: CacheEntry, uri: ArtifactUri, artifact: Artifact) -> str:
    """Leaves the model alone in the staging folder; its path there.

    Raises:
        LoadError: there is none, or several.
    """
    with writing(entry.folder):
        shutil.rmtree(entry.staging / _BLOBS, ignore_errors=True)
        names = [
            str(PurePosixPath(path.relative_to(entry.staging)))
            for path in sorted(entry.staging.rglob("*"))
            if path.is_file() and path.name not in (RESERVED, MANIFEST)
        ]
    label = f"{uri.address} (below /{IMAGE_FOLDER.rstrip('/')})" if artifact.is_image else uri.address
    try:
        found, kept = pick_model(names, uri.file, label)
    except LoadError:
        shutil.rmtree(entry.staging, ignore_errors=True)
        raise
    with writing(entry.folder):
        for name in set(names) - set(kept):
            (entry.staging / name).unlink()
    return found
