"""Fixtures of the fetch tests: a real HTTP server, an empty home, a clean environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, file_server


@pytest.fixture
def server() -> Iterator[FileServer]:
    """A fresh server."""
    with file_server() as files:
        yield files


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache that does not exist yet."""
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine's user reaches a test."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "HF_ENDPOINT", "HF_TOKEN", "NARU_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses before another try take no time; returns them."""
    pauses: list[float] = []
    monkeypatch.setattr("naru_worker.adapters.fetch.transport.pause", pauses.append)
    return pauses
