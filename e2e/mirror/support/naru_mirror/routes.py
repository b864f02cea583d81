"""Which answer a request gets, as a value. Called by the server; opens no socket and sends nothing.

Source: PEP 503, PEP 691 and PEP 700 for the index; the public hub's API as its clients use it.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from naru_mirror.catalog import Catalog, RepositoryFile, Revision, canonical_name
from naru_mirror.faults import FaultError, Faults, RequestLog, read_fault

_JSON = "application/vnd.pypi.simple.v1+json"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_REPOSITORY = r"(?P<repository>[\w.-]+/[\w.-]+)"
_TREE = re.compile(rf"/api/models/{_REPOSITORY}/tree/(?P<revision>[^/]+)")
_INFO = re.compile(rf"/api/models/{_REPOSITORY}(?:/revision/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(rf"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_LFS = re.compile(r"/_lfs/(?P<sha256>[0-9a-f]{64})")
_TREE_PAGE_FILES = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, read whole."""

    method: str
    target: str
    headers: dict[str, str]
    """Lower-case names."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """Without the query, not yet unquoted."""
        return urllib.parse.urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        """The last value of each name."""
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.target).query))


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and body; of a file only the range from ``start`` on."""

    status: int
    body: bytes | Path = b""
    headers: dict[str, str] = field(default_factory=dict)
    start: int = 0
    file_bytes: int = 0
    """How many bytes of a file are sent."""

    @property
    def length_bytes(self) -> int:
        """Of what is sent."""
        return self.file_bytes if isinstance(self.body, Path) else len(self.body)


def _json(value: Any, content_type: str = "application/json", **headers: str) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": content_type, **headers})


def _refuse(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": message}).encode(), {"Content-Type": "application/json"})


def answer(catalog: Catalog, faults: Faults, log: RequestLog, asked: Asked) -> Answer:
    """What a request gets."""
    if asked.path.startswith("/_mirror/"):
        return _control(faults, log, asked)
    if asked.method not in ("GET", "HEAD"):
        return _refuse(405, f"{asked.method} is not served here")
    if asked.path.startswith("/simple/"):
        return _project(catalog, asked)
    if asked.path.startswith("/files/"):
        wheel = catalog.wheels.get(urllib.parse.unquote(asked.path.removeprefix("/files/")))
        if wheel is None:
            return _refuse(404, "no such file")
        return _file(asked, wheel.path, wheel.size_bytes, {"ETag": f'"{wheel.sha256}"'})
    return _hub(catalog, asked)


def _control(faults: Faults, log: RequestLog, asked: Asked) -> Answer:
    match asked.method, asked.path:
        case "GET", "/_mirror/requests":
            return _json([dataclasses.asdict(request) for request in log.all()])
        case "DELETE", "/_mirror/requests":
            log.clear()
        case "DELETE", "/_mirror/faults":
            faults.clear()
        case "POST", "/_mirror/faults":
            try:
                faults.add(read_fault(json.loads(asked.body)))
            except (FaultError, ValueError) as exc:
                return _refuse(400, str(exc))
        case _:
            return _refuse(404, "no such control path")
    return Answer(204)


def _project(catalog: Catalog, asked: Asked) -> Answer:
    name = canonical_name(urllib.parse.unquote(asked.path.removeprefix("/simple/").strip("/")))
    wheels = catalog.wheels_of(name)
    if not wheels:
        return _refuse(404, "no such project")
    addresses = [f"/files/{urllib.parse.quote(wheel.path.name)}" for wheel in wheels]
    if "json" in asked.headers.get("accept", ""):
        files = [
            {"filename": w.path.name, "url": url, "hashes": {"sha256": w.sha256}, "size": w.size_bytes, "yanked": False}
            for w, url in zip(wheels, addresses, strict=True)
        ]
        versions = sorted({wheel.version for wheel in wheels})
        return _json({"meta": {"api-version": "1.1"}, "name": name, "versions": versions, "files": files}, _JSON)
    links = "\n".join(
        f'<a href="{html.escape(url)}#sha256={wheel.sha256}">{html.escape(wheel.path.name)}</a><br>'
        for wheel, url in zip(wheels, addresses, strict=True)
    )
    page = f"<!DOCTYPE html>\n<html><body>\n{links}\n</body></html>\n"
    return Answer(200, page.encode(), {"Content-Type": "text/html; charset=utf-8"})


def _file(asked: Asked, path: Path, size_bytes: int, headers: dict[str, str]) -> Answer:
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
    match = _RANGE.fullmatch(asked.headers.get("range", ""))
    if match is None or not (match[1] or match[2]):
        return Answer(200, path, headers, 0, size_bytes)
    start = int(match[1]) if match[1] else max(0, size_bytes - int(match[2]))
    end = min(int(match[2]), size_bytes - 1) if match[1] and match[2] else size_bytes - 1
    if start >= size_bytes or end < start:
        return Answer(416, b"", {"Content-Range": f"bytes */{size_bytes}"})
    return Answer(206, path, {**headers, "Content-Range": f"bytes {start}-{end}/{size_bytes}"}, start, end - start + 1)


def _hub(catalog: Catalog, asked: Asked) -> Answer:
    path = asked.path
    if lfs := _LFS.fullmatch(path):
        # Real hubs redirect to signed addresses of another host: no token is asked for here.
        file = catalog.find_object(lfs["sha256"])
        if file is None:
            return _refuse(404, "no such object")
        return _file(asked, file.path, file.size_bytes, {"ETag": f'"{file.sha256}"'})
    match = _TREE.fullmatch(path) or _RESOLVE.fullmatch(path) or _INFO.fullmatch(path)
    if match is None:
        return _refuse(404, "nothing here")
    found = match.groupdict()
    repository = found["repository"]
    if token := catalog.tokens.get(repository, ""):
        given = asked.headers.get("authorization", "")
        if given != f"Bearer {token}":
            return _refuse(403 if given else 401, "access to this repository is restricted")
    revision = catalog.find_revision(repository, urllib.parse.unquote(found.get("revision") or "main"))
    if revision is None:
        return _refuse(404, "no such repository or revision")
    if match.re is _INFO:
        siblings = [{"rfilename": name} for name in revision.files]
        return _json({"id": repository, "sha": revision.commit, "private": bool(token), "siblings": siblings})
    if match.re is _TREE:
        return _tree(asked, revision)
    return _resolve(asked, revision, urllib.parse.unquote(found["file"]))


def _tree(asked: Asked, revision: Revision) -> Answer:
    try:
        start, limit = int(asked.query.get("cursor", "0")), int(asked.query.get("limit", str(_TREE_PAGE_FILES)))
    except ValueError:
        return _refuse(400, "cursor and limit are numbers")
    if start < 0 or limit < 1:
        return _refuse(400, "cursor is 0 or more, limit 1 or more")
    files = list(revision.files.values())
    headers = {}
    if start + limit < len(files):
        query = urllib.parse.urlencode({**asked.query, "cursor": start + limit, "limit": limit})
        headers["Link"] = f'<{asked.path}?{query}>; rel="next"'
    return _json([_tree_item(file) for file in files[start : start + limit]], **headers)


def _tree_item(file: RepositoryFile) -> dict[str, Any]:
    item: dict[str, Any] = {"type": "file", "oid": file.oid, "size": file.size_bytes, "path": file.name}
    if file.is_lfs:
        item["lfs"] = {"oid": file.sha256, "size": file.size_bytes, "pointerSize": 134}
    return item


def _resolve(asked: Asked, revision: Revision, name: str) -> Answer:
    file = revision.files.get(name)
    if file is None:
        return _refuse(404, "no such file")
    headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": revision.commit}
    if file.is_lfs:
        linked = {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size_bytes)}
        return Answer(302, b"", {**headers, **linked, "Location": f"/_lfs/{file.sha256}"})
    return _file(asked, file.path, file.size_bytes, headers)
