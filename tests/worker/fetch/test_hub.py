"""``hf://`` against a hub of the same interface: choice of files, tokens, pages, resuming, hostile lists."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer, file_server
from wheels import GGUF, sha256

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import FetchedModel, fetch

COMMIT = "a" * 40
NEXT_COMMIT = "b" * 40
MODEL = {
    "model.safetensors": b"weights" * 1000,
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "chat_template.jinja": b"{{ x }}",
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"other",
    "onnx/config.json": b"other config",
}


class Hub:
    """Serves repositories in the hub's interface."""

    def __init__(self, server: FileServer) -> None:
        self.server = server

    def put(
        self, files: dict[str, bytes], commit: str = COMMIT, revision: str = "main", repo: str = "org/name"
    ) -> None:
        self.resolve(commit, revision, repo)
        tree = [{"type": "directory", "path": "onnx", "oid": "x", "size": 0}]
        tree += [self.item(path, body) for path, body in files.items()]
        self.tree(tree, commit, repo)
        for path, body in files.items():
            self.server.put(f"/{repo}/resolve/{commit}/{path}", body)

    def resolve(self, commit: Any, revision: str = "main", repo: str = "org/name") -> None:
        for name in (revision, COMMIT):
            self.server.put(f"/api/models/{repo}/revision/{name}", json.dumps({"sha": commit}).encode())

    def tree(self, items: Any, commit: str = COMMIT, repo: str = "org/name") -> None:
        self.server.put(f"/api/models/{repo}/tree/{commit}?recursive=true", json.dumps(items).encode())

    @staticmethod
    def item(path: str, body: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        item: dict[str, Any] = {"type": "file", "path": path, "oid": blob, "size": len(body)}
        if path.endswith((".safetensors", ".gguf")):
            item["lfs"] = {"oid": sha256(body), "size": len(body)}
        return item


@pytest.fixture
def hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    return Hub(server)


def names(found: FetchedModel) -> set[str]:
    return {path.name for path in found.path.iterdir()} - {"naru.json"}


def test_safetensors_come_with_config_tokenizer_and_template(hub: Hub, home: Path) -> None:
    hub.put(MODEL)
    found = fetch("hf://org/name", home=home)
    assert names(found) == {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert (found.path / "config.json").read_bytes() == b"{}"
    assert found.revision == COMMIT
    assert found.digest.startswith("sha256-tree:")


def test_the_only_gguf_is_taken_alone(hub: Hub, home: Path) -> None:
    hub.put({"q4/m.gguf": GGUF, "README.md": b""})
    found = fetch("hf://org/name", home=home)
    assert found.path.name == "m.gguf"
    assert found.path.read_bytes() == GGUF
    assert found.digest == f"sha256:{sha256(GGUF)}"


def test_an_onnx_repository_gives_its_newest_version_with_its_config(hub: Hub, home: Path) -> None:
    versions = {f"{number}/model.onnx": b"%d" % number for number in (1, 9, 10)}
    hub.put({**versions, "10/weights.bin": b"w", "config.pbtxt": b"c", "README.md": b"", "x/1/model.onnx": b"no"})
    found = fetch("hf://org/name", home=home)
    assert names(found) == {"config.pbtxt", "10"}
    assert {path.name: path.read_bytes() for path in (found.path / "10").iterdir()} == {
        "model.onnx": b"10",
        "weights.bin": b"w",
    }
    assert fetch("hf://org/name", home=home) == found, "it is whole in the cache"


def test_an_onnx_file_comes_with_its_external_data(hub: Hub, home: Path) -> None:
    hub.put({**MODEL, "onnx/model.onnx_data": b"w", "onnx/other.onnx": b"o"})
    found = fetch("hf://org/name/onnx/model.onnx", home=home)
    assert found.path.name == "model.onnx"
    assert {path.name for path in found.path.parent.iterdir()} == {"model.onnx", "model.onnx_data", "naru.json"}
    hub.put({"a.onnx": b"a", "b.onnx": b"b"}, repo="org/two")
    with pytest.raises(LoadError, match=r"several .onnx files \(a.onnx, b.onnx\)"):
        fetch("hf://org/two", home=home)


def test_one_of_several_ggufs_must_be_named(hub: Hub, home: Path) -> None:
    hub.put({"a.gguf": GGUF + b"a", "sub/b.gguf": GGUF + b"b"})
    with pytest.raises(LoadError, match=r"several GGUF files; name one as hf://org/name/FILE: a.gguf, sub/b.gguf"):
        fetch("hf://org/name", home=home)
    assert fetch("hf://org/name/sub/b.gguf", home=home).path.read_bytes() == GGUF + b"b"
    assert fetch("hf://org/name/a.gguf", home=home).path.read_bytes() == GGUF + b"a"
    with pytest.raises(LoadError, match=r"no file 'c.gguf'; it has a.gguf, sub/b.gguf"):
        fetch("hf://org/name/c.gguf", home=home)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "pickles only, which run code"),
        ({"README.md": b"x"}, "no .safetensors and no .gguf"),
        ({"original/model.safetensors": b"x"}, "no .safetensors and no .gguf"),
    ],
)
def test_a_repository_without_a_model_is_refused(hub: Hub, home: Path, files: dict[str, bytes], message: str) -> None:
    hub.put(files)
    with pytest.raises(LoadError, match=message):
        fetch("hf://org/name", home=home)


def test_a_restart_does_not_change_the_model_but_a_refresh_does(hub: Hub, home: Path) -> None:
    hub.put({"m.gguf": GGUF})
    first = fetch("hf://org/name", home=home)
    hub.put({"m.gguf": GGUF + b"new"}, NEXT_COMMIT)
    hub.server.asked.clear()
    assert fetch("hf://org/name", home=home) == first
    assert hub.server.asked == []
    refreshed = fetch("hf://org/name", home=home, refresh=True)
    assert refreshed.revision == NEXT_COMMIT
    assert fetch("hf://org/name", home=home) == refreshed
    assert fetch(f"hf://org/name@{COMMIT}", home=home) == first


def test_a_branch_is_taken_from_the_uri_or_the_revision(hub: Hub, home: Path) -> None:
    hub.put({"m.gguf": GGUF}, revision="refs%2Fpr%2F1")
    assert fetch("hf://org/name", "refs/pr/1", home=home).revision == COMMIT


def test_a_broken_transfer_keeps_what_is_complete(hub: Hub, home: Path) -> None:
    hub.put(MODEL)
    weights = f"/org/name/resolve/{COMMIT}/model.safetensors"
    template = f"/org/name/resolve/{COMMIT}/chat_template.jinja"
    hub.server.served[template].failures = [500] * 9
    with pytest.raises(LoadError, match="HTTP 500"):
        fetch("hf://org/name", home=home)
    hub.server.served[template].failures = []
    hub.server.asked.clear()
    assert (fetch("hf://org/name", home=home).path / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert hub.server.ranges(weights) == []


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"], ids=["large file", "small file"])
def test_every_file_is_checked(hub: Hub, home: Path, path: str) -> None:
    hub.put(MODEL)
    served = hub.server.served[f"/org/name/resolve/{COMMIT}/{path}"]
    served.body = b"?" + served.body[1:]
    with pytest.raises(LoadError, match=rf"org/name/{path}: its .* was announced"):
        fetch("hf://org/name", home=home)
    assert not (home / "models" / "hf" / "org" / "name" / COMMIT).exists()


def test_the_list_may_have_pages(hub: Hub, home: Path) -> None:
    hub.put(MODEL)
    first = hub.server.served[f"/api/models/org/name/tree/{COMMIT}?recursive=true"]
    everything = json.loads(first.body)
    first.body = json.dumps(everything[:3]).encode()
    first.headers["Link"] = f'</api/models/org/name/tree/{COMMIT}?page=2>; rel="next"'
    hub.server.put(f"/api/models/org/name/tree/{COMMIT}?page=2", json.dumps(everything[3:]).encode())
    assert "tokenizer.json" in names(fetch("hf://org/name", home=home))


@pytest.fixture
def elsewhere() -> Iterator[FileServer]:
    with file_server() as files:
        yield files


def test_the_token_goes_to_the_hub_and_to_no_other_host(
    hub: Hub, home: Path, elsewhere: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.put({"m.gguf": GGUF, "a.txt": b""})
    hub.server.redirect(f"/org/name/resolve/{COMMIT}/m.gguf", f"{elsewhere.url}/blob")
    elsewhere.put("/blob", GGUF)
    tree = hub.server.served[f"/api/models/org/name/tree/{COMMIT}?recursive=true"]
    tree.headers["Link"] = f'<{elsewhere.url}/page2>; rel="next"'
    elsewhere.put("/page2", b"[]")
    assert fetch("hf://org/name", home=home).path.read_bytes() == GGUF
    assert {asked.headers.get("authorization") for asked in hub.server.asked} == {"Bearer hf_secret"}
    assert [asked.path for asked in elsewhere.asked] == ["/page2", "/blob"]
    assert {asked.headers.get("authorization") for asked in elsewhere.asked} == {None}


def test_a_gated_repository_says_to_set_the_token_and_does_not_show_it(
    hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.server.put("/api/models/org/name/revision/main", b"").failures = [401]
    with pytest.raises(LoadError, match="refuses access") as caught:
        fetch("hf://org/name", home=home)
    assert "hf_secret" not in caught.value.message


@pytest.mark.parametrize("commit", ["", "../../etc", "A" * 40, 7, None], ids=repr)
def test_a_commit_that_is_none_is_refused(hub: Hub, home: Path, commit: object) -> None:
    hub.put({"m.gguf": GGUF})
    hub.resolve(commit)
    with pytest.raises(LoadError, match="which is none"):
        fetch("hf://org/name", home=home)


@pytest.mark.parametrize(
    "items",
    [
        {},
        [3],
        [{"type": "file"}],
        [{"type": "file", "path": "a.gguf", "size": -1, "oid": "x"}],
        [{"type": "file", "path": "a\0.gguf", "size": 1, "oid": "x"}],
        [{"type": "file", "path": "a", "lfs": 3}],
    ],
    ids=repr,
)
def test_a_broken_list_is_a_sentence(hub: Hub, home: Path, items: object) -> None:
    hub.resolve(COMMIT)
    hub.tree(items)
    with pytest.raises(LoadError, match=r"list of files is broken|no .safetensors"):
        fetch("hf://org/name", home=home)


@pytest.mark.parametrize("path", ["../../../../evil.gguf", "/evil.gguf", "a/../../evil.gguf"])
def test_a_path_of_the_list_cannot_lead_out(hub: Hub, home: Path, path: str) -> None:
    hub.put({path: GGUF})
    for asked in (f"/org/name/resolve/{COMMIT}/{path}", f"/org/name/{path}", "/evil.gguf", "/org/evil.gguf"):
        hub.server.put(asked, GGUF)
    try:
        found = fetch("hf://org/name", home=home)
    except LoadError:
        found = None
    assert found is None or found.path.parent.name == COMMIT
    assert [p for p in home.parent.rglob("evil.gguf") if COMMIT not in str(p)] == []


def test_a_model_larger_than_the_disk_is_refused_before_the_download(hub: Hub, home: Path) -> None:
    hub.put({"m.gguf": GGUF})
    item = Hub.item("m.gguf", GGUF)
    item["lfs"]["size"] = 1 << 60
    hub.tree([item])
    hub.server.asked.clear()
    with pytest.raises(LoadError, match="org/name needs 1,152,921,504,607 MB on disk"):
        fetch("hf://org/name", home=home)
    assert len(hub.server.asked) == 2


def test_a_hub_that_is_away_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(LoadError, match=r"org/name@main: no answer \(ConnectError"):
        fetch("hf://org/name", home=home)
