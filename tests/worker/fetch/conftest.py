"""Fixtures of the fetch tests: a real HTTP server, an empty home, a clean environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, file_server
from object_server import ObjectServer, object_server

from naru_worker.adapters.fetch import bucket


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


@pytest.fixture(scope="module")
def shared_store() -> Iterator[ObjectServer]:
    """An S3 server for all tests of a module."""
    with object_server() as server:
        server.put("models", b"")
        yield server


@pytest.fixture
def store(shared_store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Its objects stay; each test has a folder of its own."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared_store.url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(bucket, "RANGE_BYTES", 1 << 20)
    shared_store.forget()
    yield shared_store
    shared_store.fault = None
    shared_store.rot = lambda asked, body: body
    shared_store.on_sent = lambda num_bytes: None
