"""Which index is asked, and which wheel is taken of what it offers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from file_server import FileServer
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import package_index
from naru_worker.adapters.fetch.package_index import Wheel, choose_wheel, find_wheel, index_url
from naru_worker.adapters.fetch.transport import open_client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with open_client({}) as opened:
        yield opened


@pytest.fixture
def pip_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Answers of pip's commands, by their last word."""
    answers: dict[str, str] = {}
    monkeypatch.setattr(package_index, "_pips", lambda: iter([([sys.executable], {})]))
    monkeypatch.setattr(package_index, "_ask", lambda command, env: answers.get(command[-1], ""))
    return answers


def test_the_environment_beats_every_file(pip_says: dict[str, str], tmp_path: Path) -> None:
    pip_says["list"] = "global.index-url='http://pip.invalid/simple'"
    environ = {"PIP_INDEX_URL": "http://a.invalid", "UV_INDEX_URL": "http://b.invalid"}
    assert index_url({**environ, "UV_DEFAULT_INDEX": "http://c.invalid"}) == "http://c.invalid"
    assert index_url(environ) == "http://b.invalid"
    assert index_url({"PIP_INDEX_URL": " http://a.invalid "}) == "http://a.invalid"


@pytest.mark.parametrize(
    "text",
    ['index-url = "http://uv.invalid/simple"', '[[index]]\nurl = "http://uv.invalid/simple"\ndefault = true'],
)
def test_the_settings_of_uv_are_read(pip_says: dict[str, str], tmp_path: Path, text: str) -> None:
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text(text)
    assert index_url({"XDG_CONFIG_HOME": str(tmp_path)}) == "http://uv.invalid/simple"


def test_the_settings_of_pip_are_read(pip_says: dict[str, str], tmp_path: Path) -> None:
    pip_says["list"] = ":env:.no-input='1'\nglobal.index-url='http://pip.invalid/simple'\nglobal.timeout='3'\n"
    assert index_url({"XDG_CONFIG_HOME": str(tmp_path)}) == "http://pip.invalid/simple"


def test_without_settings_it_is_what_pip_takes(pip_says: dict[str, str], tmp_path: Path) -> None:
    pip_says[package_index._PIP_DEFAULT] = "http://default.invalid/simple\n"
    assert index_url({"XDG_CONFIG_HOME": str(tmp_path)}) == "http://default.invalid/simple"


def test_a_real_pip_knows_a_default(tmp_path: Path) -> None:
    # Whatever this Python's pip is configured to; it is a web address with the simple API.
    assert index_url({"XDG_CONFIG_HOME": str(tmp_path)}).startswith(("http://", "https://"))


def test_without_any_pip_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(package_index, "_pips", lambda: iter([]))
    with pytest.raises(LoadError, match="set PIP_INDEX_URL"):
        index_url({"XDG_CONFIG_HOME": str(tmp_path)})


def offers(*names: str, yanked: tuple[str, ...] = ()) -> list[tuple[Wheel, bool]]:
    return [(Wheel(name, f"http://x.invalid/{name}", "", "", None), name in yanked) for name in names]


@pytest.mark.parametrize(
    ("version", "names", "expected"),
    [
        ("", ["tiny-1.0-py3-none-any.whl", "tiny-1.10-py3-none-any.whl", "tiny-1.9-py3-none-any.whl"], "1.10"),
        ("", ["tiny-1.0-py3-none-any.whl", "tiny-2.0rc1-py3-none-any.whl"], "1.0"),
        ("", ["tiny-2.0rc1-py3-none-any.whl"], "2.0rc1"),
        ("1.0", ["tiny-1.0.0-py3-none-any.whl", "tiny-2.0-py3-none-any.whl"], "1.0.0"),
        ("", ["tiny-1.0-py3-none-any.whl", "tiny-9.0.tar.gz", "other-9.0-py3-none-any.whl", "broken.whl"], "1.0"),
        ("", ["Tiny-1.0-py3-none-any.whl"], "1.0"),
    ],
)
def test_the_right_version_is_chosen(version: str, names: list[str], expected: str) -> None:
    assert choose_wheel("tiny", version, offers(*names)).version == expected


def test_a_wheel_for_any_platform_is_preferred() -> None:
    names = ["tiny-1.0-cp311-cp311-win_amd64.whl", "tiny-1.0-py3-none-any.whl", "tiny-1.0-zz-none-win32.whl"]
    assert choose_wheel("tiny", "", offers(*names)).filename == "tiny-1.0-py3-none-any.whl"


def test_a_yanked_release_is_taken_only_by_name() -> None:
    found = offers("tiny-1.0-py3-none-any.whl", "tiny-2.0-py3-none-any.whl", yanked=("tiny-2.0-py3-none-any.whl",))
    assert choose_wheel("tiny", "", found).version == "1.0"
    assert choose_wheel("tiny", "2.0", found).version == "2.0"


@pytest.mark.parametrize(("version", "message"), [("3.0", "version '3.0'"), ("", "release"), ("x!y", "is no version")])
def test_nothing_to_take_is_a_sentence(version: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        choose_wheel("tiny", version, offers("tiny-1.0.tar.gz"))


@given(st.permutations(["1.0", "1.2", "1.10", "0.9", "2.0a1"]))
def test_the_order_of_offers_does_not_matter(versions: list[str]) -> None:
    found = offers(*(f"tiny-{version}-py3-none-any.whl" for version in versions))
    assert choose_wheel("tiny", "", found).version == "1.10"


def test_a_json_index_gives_url_hash_and_size(server: FileServer, client: httpx.Client) -> None:
    files = [
        {
            "filename": "tiny-1.0-py3-none-any.whl",
            "url": "../../files/tiny.whl",
            "hashes": {"sha256": "AB" * 32},
            "size": 12,
        },
        {"filename": "tiny-1.1-py3-none-any.whl", "url": "/x", "hashes": {}, "size": -1, "yanked": "broken"},
    ]
    body = json.dumps({"files": files}).encode()
    server.put("/simple/tiny/", body, "application/vnd.pypi.simple.v1+json")
    wheel = find_wheel(client, f"{server.url}/simple", "tiny", "")
    assert wheel == Wheel("tiny-1.0-py3-none-any.whl", f"{server.url}/files/tiny.whl", "1.0", "ab" * 32, 12)
    assert "vnd.pypi.simple.v1+json" in server.asked[0].headers["accept"]


def test_an_html_index_gives_url_and_hash(server: FileServer, client: httpx.Client) -> None:
    page = (
        b'<a href="https://x.invalid/tiny-0.9-py3-none-any.whl">old</a>'
        b'<a href="/f/tiny-1.0%2Blocal-py3-none-any.whl#sha256=abc">new</a>'
        b'<a href="tiny-2.0-py3-none-any.whl" data-yanked="">gone</a><a name="x">no link</a>'
    )
    server.put("/simple/tiny/", page, "text/html")
    wheel = find_wheel(client, f"{server.url}/simple/", "tiny", "")
    assert wheel.url == f"{server.url}/f/tiny-1.0%2Blocal-py3-none-any.whl"
    assert (wheel.version, wheel.sha256, wheel.size_bytes) == ("1.0+local", "abc", None)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": [{}]}', b'{"files": [{"filename": "x", "url": 1}, 2]}']
)
def test_a_broken_json_answer_is_a_sentence(server: FileServer, client: httpx.Client, body: bytes) -> None:
    server.put("/tiny/", body, "application/json")
    with pytest.raises(LoadError, match="broken"):
        find_wheel(client, server.url, "tiny", "")


def test_an_unknown_package_is_a_sentence_without_the_index_and_its_password(
    server: FileServer, client: httpx.Client
) -> None:
    index = server.url.replace("http://", "http://user:secret@")
    with pytest.raises(LoadError) as caught:
        find_wheel(client, index, "tiny", "")
    assert caught.value.message == "package 'tiny': not found (HTTP 404); check the name and the revision"
    assert server.asked[0].headers["authorization"].startswith("Basic ")
