"""Which package index the user has configured, and which wheel of a package it offers. Called by the pypi scheme.

The index comes from the settings of uv and pip; where there are none, from the default that the installed pip knows.
"""

from __future__ import annotations

import html.parser
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tomllib
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.transport import get_page

if TYPE_CHECKING:
    import httpx

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_ENVIRONMENT = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
_PIP_DEFAULT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
_PIP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of an index."""

    filename: str
    url: str
    version: str
    sha256: str
    """Hex; empty where the index states none."""
    size_bytes: int | None


def index_url(environ: Mapping[str, str] = os.environ) -> str:
    """The simple index to ask; may hold a password, so it never goes into a message.

    Raises:
        LoadError: none is configured and no pip is there to know the default.
    """
    for name in _ENVIRONMENT:
        if url := environ.get(name, "").strip():
            return url
    if url := _from_uv_files(environ):
        return url
    for command, env in _pips():
        for line in _ask([*command, "-m", "pip", "config", "list"], env).splitlines():
            key, _, value = line.partition("=")
            if key.endswith(".index-url") and (url := "".join(shlex.split(value))):
                return url
        if url := _ask([*command, "-c", _PIP_DEFAULT], env).strip():
            return url
    raise LoadError("no package index is configured and pip is not installed; set PIP_INDEX_URL to your index")


def _from_uv_files(environ: Mapping[str, str]) -> str:
    config = Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    for path in (config / "uv" / "uv.toml", Path("/etc/uv/uv.toml")):
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for index in settings.get("index", ()):
            if isinstance(index, dict) and index.get("default") and isinstance(index.get("url"), str):
                return str(index["url"])
        if isinstance(url := settings.get("index-url"), str):
            return url
    return ""


def _pips() -> Iterator[tuple[list[str], dict[str, str]]]:
    """Ways to run a pip, as command prefix and environment: this Python's, its base's, the one bundled with it."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable], env
    base = getattr(sys, "_base_executable", "") or sys.executable
    if base != sys.executable:
        yield [base], env
    if (spec := importlib.util.find_spec("ensurepip")) and spec.origin:
        for bundled in sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")):
            yield [sys.executable], {**env, "PYTHONPATH": str(bundled)}


def _ask(command: list[str], env: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_wheel(client: httpx.Client, index: str, name: str, version: str) -> Wheel:
    """The wheel of ``version``, or of the newest final release where it is empty; one for any platform if there is one.

    Raises:
        LoadError: no such package or version, no wheel, or an index that cannot be read.
    """
    page = get_page(client, f"{index.rstrip('/')}/{name}/", f"package {name!r}", headers={"Accept": _ACCEPT})
    if "json" in page.headers.get("content-type", ""):
        offers = _from_json(name, page)
    else:
        offers = _from_html(page)
    return choose_wheel(name, version, offers)


def choose_wheel(name: str, version: str, offers: Iterable[tuple[Wheel, bool]]) -> Wheel:
    """Picks among (wheel, yanked) pairs; see `find_wheel`."""
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
    from packaging.version import InvalidVersion, Version

    try:
        wanted = Version(version) if version else None
    except InvalidVersion as exc:
        raise LoadError(f"package {name!r}: {version!r} is no version; write pypi://{name}@1.2.3") from exc
    ranked = []
    for wheel, is_yanked in offers:
        try:
            project, parsed, _, tags = parse_wheel_filename(wheel.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if canonicalize_name(project) != name or (wanted is not None and parsed != wanted):
            continue
        if wanted is None and is_yanked:
            continue
        is_any = any(tag.platform == "any" for tag in tags)
        ranked.append(((not parsed.is_prerelease, parsed, is_any, wheel.filename), parsed, wheel))
    if not ranked:
        what = f"version {version!r}" if version else "release"
        raise LoadError(f"package {name!r}: the index has no wheel of a {what}; check name and version")
    _, parsed, wheel = max(ranked, key=lambda item: item[0])
    return Wheel(wheel.filename, wheel.url, str(parsed), wheel.sha256, wheel.size_bytes)


def _from_json(name: str, page: httpx.Response) -> list[tuple[Wheel, bool]]:
    """Source: PEP 691, with the sizes of PEP 700."""
    try:
        files = json.loads(page.content)["files"]
        return [(_json_wheel(page, file), bool(file.get("yanked"))) for file in files]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise LoadError(f"package {name!r}: the index's answer is broken ({exc}); check the configured index") from exc


def _json_wheel(page: httpx.Response, file: dict[str, Any]) -> Wheel:
    size = file.get("size")
    sha256 = file.get("hashes", {}).get("sha256", "")
    return Wheel(
        filename=str(file["filename"]),
        url=str(page.request.url.join(str(file["url"]))),
        version="",
        sha256=sha256.lower() if isinstance(sha256, str) else "",
        size_bytes=size if type(size) is int and size >= 0 else None,
    )


class _Anchors(html.parser.HTMLParser):
    """Collects (href, yanked) of the links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes the links, ignores the rest."""
        values = dict(attrs)
        if tag == "a" and (href := values.get("href")):
            self.found.append((href, "data-yanked" in values))


def _from_html(page: httpx.Response) -> list[tuple[Wheel, bool]]:
    """Source: PEP 503."""
    parser = _Anchors()
    parser.feed(page.text)
    offers = []
    for href, is_yanked in parser.found:
        url, _, fragment = href.partition("#")
        sha256 = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else ""
        filename = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        offers.append((Wheel(filename, str(page.request.url.join(url)), "", sha256, None), is_yanked))
    return offers
