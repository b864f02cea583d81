"""Models of a hub (``hf://``). Called by the fetcher. The endpoint is ``HF_ENDPOINT``, the token ``HF_TOKEN``,
of the job's credentials or of the environment.

A revision is resolved to a commit once; what is cached under it is used until a refresh is asked for, so that a
restart never changes the model.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, read_ref, write_ref, writing
from naru_worker.adapters.fetch.choosing import choose_files, entry_name, flat_path
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.job import FetchJob
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, byte_reporter, shifted
from naru_worker.adapters.fetch.transport import get_page, open_client
from naru_worker.adapters.fetch.uri import HubUri
from naru_worker.adapters.fetch.wheel import record_digest

if TYPE_CHECKING:
    import httpx

DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_TREE_PAGES = 100
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository's tree."""

    path: str
    size_bytes: int
    checksum: Checksum


def fetch_repository(uri: HubUri, job: FetchJob) -> FetchedModel:
    """The safetensors of a repository with config and tokenizer, or its GGUF, or its ONNX model.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    revision = uri.revision or "main"
    ref = job.entry("hf", uri.org, uri.name, "refs", urllib.parse.quote(revision, safe="")).folder
    if not job.refresh and (commit := _known_commit(revision, ref)):
        ready = _entry(job, uri, commit).open()
        if ready is not None:
            return ready
    job.on_progress(FetchProgress("resolving", detail=uri.repo))
    endpoint = (job.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if (token := job.environ.get("HF_TOKEN", "").strip()) else {}
    with open_client(job.environ, job.settings.fetch_stall_timeout_s) as client:
        commit = _resolve(client, endpoint, uri, revision, headers)
        entry = _entry(job, uri, commit)
        with entry.lock(lambda: job.waiting(entry, uri.repo)):
            ready = entry.open()
            if ready is None:
                files = choose_hub_files(_tree(client, endpoint, uri, commit, headers), uri)
                ready = _download(client, endpoint, uri, commit, files, entry, headers, job)
        write_ref(ref, commit)
    return ready


def _known_commit(revision: str, ref: Path) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    commit = read_ref(ref)
    return commit if _COMMIT.fullmatch(commit) else ""


def _entry(job: FetchJob, uri: HubUri, commit: str) -> CacheEntry:
    leaf = commit + (f"--{uri.file.replace('/', '--')}" if uri.file else "")
    return job.entry("hf", uri.org, uri.name, leaf)


def _resolve(client: httpx.Client, endpoint: str, uri: HubUri, revision: str, headers: dict[str, str]) -> str:
    url = f"{endpoint}/api/models/{uri.repo}/revision/{urllib.parse.quote(revision, safe='')}"
    page = get_page(client, url, f"{uri.repo}@{revision}", headers=headers)
    try:
        commit = json.loads(page.content)["sha"]
    except (ValueError, KeyError, TypeError) as exc:
        raise LoadError(f"{uri.repo}: the hub's answer names no commit; check HF_ENDPOINT") from exc
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise LoadError(f"{uri.repo}: the hub names commit {str(commit)[:80]!r}, which is none; check HF_ENDPOINT")
    return commit


def _tree(client: httpx.Client, endpoint: str, uri: HubUri, commit: str, headers: dict[str, str]) -> list[HubFile]:
    url = f"{endpoint}/api/models/{uri.repo}/tree/{commit}?recursive=true"
    found: list[HubFile] = []
    for _ in range(_MAX_TREE_PAGES):
        page = get_page(client, url, f"{uri.repo}'s list of files", headers=headers)
        try:
            found += [_hub_file(item) for item in json.loads(page.content) if item["type"] == "file"]
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise LoadError(f"{uri.repo}: the hub's list of files is broken ({exc!r}); check HF_ENDPOINT") from exc
        following = page.links.get("next", {}).get("url", "")
        if not following:
            return found
        url = str(page.request.url.join(following))
        if urllib.parse.urlsplit(url)[:2] != urllib.parse.urlsplit(endpoint)[:2]:
            headers = {}  # the token is for the endpoint alone
    raise LoadError(f"{uri.repo}: the list of files has over {_MAX_TREE_PAGES} pages; name a .gguf file of it")


def _hub_file(item: dict[str, Any]) -> HubFile:
    lfs = item.get("lfs") or {}
    size = lfs.get("size", item["size"])
    if type(size) is not int or size < 0:
        raise ValueError(f"size {size!r}")
    if not str(item["path"]).isprintable():
        raise ValueError(f"path {item['path']!r}")
    checksum = Checksum("sha256", str(lfs["oid"])) if lfs else Checksum("git-sha1", str(item["oid"]))
    return HubFile(str(item["path"]), size, checksum)


def choose_hub_files(files: list[HubFile], uri: HubUri) -> list[HubFile]:
    """Those of a repository to fetch; see `choose_files`.

    Raises:
        LoadError: see `choose_files`.
    """
    by_path = {file.path: file for file in files}
    return [by_path[path] for path in choose_files(by_path, uri.file, uri.repo, f"hf://{uri.repo}")]


def _download(
    client: httpx.Client,
    endpoint: str,
    uri: HubUri,
    commit: str,
    files: list[HubFile],
    entry: CacheEntry,
    headers: dict[str, str],
    job: FetchJob,
) -> FetchedModel:
    total = sum(file.size_bytes for file in files)
    job.reserve(entry, total, uri.repo)
    on_bytes = byte_reporter(job.on_progress, "downloading", uri.repo)
    done = 0
    for file in files:
        target = entry.staging / flat_path(file.path, uri.file)
        if not (target.is_file() and target.stat().st_size == file.size_bytes):
            url = f"{endpoint}/{uri.repo}/resolve/{commit}/{urllib.parse.quote(file.path)}"
            with writing(entry.folder):
                target.parent.mkdir(exist_ok=True)
            remote = RemoteFile(url, f"{uri.repo}/{file.path}", file.size_bytes, file.checksum)
            download(client, remote, target, shifted(on_bytes, done, total), headers=headers)
        done += file.size_bytes
    return entry.commit(
        entry=entry_name([flat_path(file.path, uri.file) for file in files], uri.file),
        digest=record_digest((flat_path(file.path, uri.file), file.checksum.hexdigest) for file in files),
        revision=commit,
    )
