"""Models of a hub (``hf://``). Called by the fetcher. The endpoint is ``$HF_ENDPOINT``, the token ``$HF_TOKEN``.

A revision is resolved to a commit once; what is cached under it is used until a refresh is asked for, so that a
restart never changes the model.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import CacheEntry, cache_entry, require_space, writing
from naru_worker.adapters.fetch.download import Checksum, RemoteFile, download
from naru_worker.adapters.fetch.model import FetchedModel, FetchProgress, OnProgress, byte_reporter
from naru_worker.adapters.fetch.transport import get_page, open_client
from naru_worker.adapters.fetch.uri import PICKLE_SUFFIXES, HubUri
from naru_worker.adapters.fetch.wheel import record_digest

if TYPE_CHECKING:
    import httpx

DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_TREE_PAGES = 100
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository's tree."""

    path: str
    size_bytes: int
    checksum: Checksum


def fetch_repository(
    uri: HubUri, home: Path, on_progress: OnProgress, *, refresh: bool, environ: Mapping[str, str] = os.environ
) -> FetchedModel:
    """The safetensors of a repository with config and tokenizer, or its GGUF.

    Raises:
        LoadError: see `naru_worker.adapters.fetch.fetch`.
    """
    revision = uri.revision or "main"
    ref = home.joinpath("models", "hf", uri.org, uri.name, "refs", urllib.parse.quote(revision, safe=""))
    if not refresh and (commit := _known_commit(revision, ref)):
        ready = _entry(home, uri, commit).load()
        if ready is not None:
            return ready
    on_progress(FetchProgress("resolving", detail=uri.repo))
    endpoint = (environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if (token := environ.get("HF_TOKEN", "").strip()) else {}
    with open_client(environ) as client:
        commit = _resolve(client, endpoint, uri, revision, headers)
        entry = _entry(home, uri, commit)
        with entry.lock(lambda: on_progress(FetchProgress("waiting", detail=uri.repo))):
            ready = entry.load()
            if ready is None:
                files = choose_files(_tree(client, endpoint, uri, commit, headers), uri)
                ready = _download(client, endpoint, uri, commit, files, entry, headers, on_progress)
        with writing(ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
            staged = ref.with_name(f"{ref.name}.{os.getpid()}.part")
            staged.write_text(commit)
            staged.rename(ref)
    return ready


def _known_commit(revision: str, ref: Path) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        commit = ref.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _entry(home: Path, uri: HubUri, commit: str) -> CacheEntry:
    leaf = commit + (f"--{uri.file.replace('/', '--')}" if uri.file else "")
    return cache_entry(home, "hf", uri.org, uri.name, leaf)


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


def choose_files(files: list[HubFile], uri: HubUri) -> list[HubFile]:
    """Those to fetch: the file that was named, else the safetensors of the top folder with what belongs to them.

    Raises:
        LoadError: nothing there that may be loaded, or a choice that only the user can make.
    """
    by_path = {file.path: file for file in files}
    ggufs = sorted(path for path in by_path if path.lower().endswith(".gguf"))
    shown = ", ".join(ggufs[:8]) + ("…" if len(ggufs) > 8 else "")
    if uri.file:
        if uri.file not in by_path:
            raise LoadError(f"{uri.repo}: has no file {uri.file!r}; it has {shown or 'no .gguf file'}")
        return [by_path[uri.file]]
    top = [file for file in files if len(PurePosixPath(file.path).parts) == 1 and "\\" not in file.path]
    weights = [file for file in top if file.path.endswith(".safetensors")]
    if weights:
        return weights + [file for file in top if file.path.endswith(_TEXT_SUFFIXES)]
    if len(ggufs) == 1:
        return [by_path[ggufs[0]]]
    if ggufs:
        raise LoadError(f"{uri.repo}: holds several GGUF files; name one as hf://{uri.repo}/FILE: {shown}")
    if any(path.lower().endswith(PICKLE_SUFFIXES) for path in by_path):
        raise LoadError(f"{uri.repo}: holds pickles only, which run code when read; use one with safetensors or GGUF")
    raise LoadError(f"{uri.repo}: holds no .safetensors and no .gguf file; it is no model that can be served")


def _shifted(on_bytes: Callable[[int, int], None], base: int, total: int) -> Callable[[int, int], None]:
    return lambda done, _: on_bytes(base + done, total)


def _download(
    client: httpx.Client,
    endpoint: str,
    uri: HubUri,
    commit: str,
    files: list[HubFile],
    entry: CacheEntry,
    headers: dict[str, str],
    on_progress: OnProgress,
) -> FetchedModel:
    total = sum(file.size_bytes for file in files)
    with writing(entry.folder):
        entry.staging.mkdir(parents=True, exist_ok=True)
    present = sum(path.stat().st_size for path in entry.staging.iterdir() if path.is_file())
    require_space(entry.folder, max(0, total - present), uri.repo)
    on_bytes = byte_reporter(on_progress, "downloading", uri.repo)
    done = 0
    for file in files:
        # Only the last part of a path: the entry is flat, so no path can lead out of it.
        target = entry.staging / PurePosixPath(file.path).name
        if not (target.is_file() and target.stat().st_size == file.size_bytes):
            url = f"{endpoint}/{uri.repo}/resolve/{commit}/{urllib.parse.quote(file.path)}"
            remote = RemoteFile(url, f"{uri.repo}/{file.path}", file.size_bytes, file.checksum)
            download(client, remote, target, _shifted(on_bytes, done, total), headers=headers)
        done += file.size_bytes
    is_gguf = len(files) == 1 and files[0].path.lower().endswith(".gguf")
    return entry.commit(
        entry=PurePosixPath(files[0].path).name if is_gguf else "",
        digest=record_digest((PurePosixPath(file.path).name, file.checksum.hexdigest) for file in files),
        revision=commit,
    )
