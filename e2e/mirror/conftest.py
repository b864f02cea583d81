"""Fixtures of the mirror's tests: a running mirror, and no setting of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(_ROOT / "tests" / "worker" / "support"))

if TYPE_CHECKING:
    from naru_mirror.server import Mirror


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """A client that never leaves plain HTTP: making one with certificates is most of a request's time."""
    with httpx.Client(verify=False, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine's user reaches a test, and pauses before another try take no time."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "HF_ENDPOINT", "HF_TOKEN", "NARU_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("naru_worker.adapters.fetch.transport.pause", lambda delay_s: None)


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror with nothing in it, that fetches in this process use."""
    from naru_mirror.catalog import Catalog
    from naru_mirror.server import running_mirror

    with running_mirror(Catalog()) as running:
        monkeypatch.setenv("PIP_INDEX_URL", running.index_url)
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running
