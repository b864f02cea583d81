"""Reading manifest files: which, in what order, and what is said about broken ones."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from naru_operator.adapters.manifest_files import is_ours, manifest_changes, read_manifests
from naru_proto.crd.v1alpha1 import InvalidManifest

MODEL = """\
apiVersion: serving.naru.dev/v1alpha1
kind: ModelDeployment
metadata: {{name: {name}}}
spec: {{model: {{uri: "pypi://x"}}}}
"""


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def names(*paths: Path) -> list[str]:
    return [manifest.metadata.name for manifest in read_manifests(paths)]


def test_a_folder_is_read_flat_and_in_name_order(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", MODEL.format(name="b1") + "---\n" + MODEL.format(name="b2"))
    write(tmp_path, "a.yml", MODEL.format(name="a"))
    write(tmp_path, "c.json", '{"apiVersion": "v1", "kind": "List", "items": []}')
    write(tmp_path, "notes.txt", "no manifest")
    write(tmp_path / "deeper", "d.yaml", MODEL.format(name="d"))
    assert names(tmp_path) == ["a", "b1", "b2"]
    assert names(tmp_path / "deeper", tmp_path / "b.yaml", tmp_path / "b.yaml") == ["d", "b1", "b2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is no valid YAML at line 1"),
        ("a: 1\na: 2", "at line 2, column 1: key 'a' stands twice"),
        ("a: &x [1]\nb: *x", "YAML aliases are not taken"),
        ("!!python/object/apply:os.system ['true']", "is no valid YAML"),
        ("a: \x01", "is no valid YAML"),
        ("[" * 5000, "is nested too deeply|is no valid YAML"),
        ("kind: Pod", "kind: 'Pod' is not one of"),
        ("just text", "must be a mapping"),
        ("2001-99-99", "is no valid YAML"),
        ("x" * (1 << 20) + "x", "is larger than 1048576 bytes"),
    ],
    ids=lambda value: value[:30],
)
def test_a_broken_file_is_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, "m.yaml", text)
    with pytest.raises(InvalidManifest, match=message) as caught:
        read_manifests([tmp_path])
    assert str(file) in caught.value.message


def test_bytes_that_are_no_text_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(InvalidManifest, match="not UTF-8 text at byte 3"):
        read_manifests([tmp_path])


def test_all_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "kind: Pod")
    write(tmp_path, "b.yaml", "a: [1")
    with pytest.raises(InvalidManifest) as caught:
        read_manifests([tmp_path, tmp_path / "missing"])
    assert len(caught.value.problems) == 3
    assert "there is no such file or folder" in caught.value.message


def test_names_that_collide_over_files_are_told(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", MODEL.format(name="twin"))
    write(tmp_path, "b.yaml", MODEL.format(name="twin"))
    with pytest.raises(InvalidManifest, match=r"'twin': metadata\.name: stands twice"):
        read_manifests([tmp_path])


def test_an_empty_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match=r"the folder has no \.yaml"):
        read_manifests([tmp_path])


@pytest.mark.parametrize("way", ["written", "renamed over", "new beside it", "removed"])
async def test_a_save_is_seen_however_the_editor_does_it(tmp_path: Path, way: str) -> None:
    file = write(tmp_path, "m.yaml", MODEL.format(name="a"))
    write(tmp_path, "n.yaml", MODEL.format(name="n"))
    watched = [tmp_path] if way in ("new beside it", "removed") else [file]
    changes = manifest_changes(watched)
    seen = asyncio.ensure_future(anext(changes))

    def save() -> None:
        if way == "written":
            file.write_text(MODEL.format(name="b"))
        elif way == "renamed over":
            write(tmp_path, "m.yaml.swp", MODEL.format(name="b")).rename(file)
        elif way == "removed":
            (tmp_path / "n.yaml").unlink(missing_ok=True)
        else:
            write(tmp_path, f"more-{os.urandom(4).hex()}.yaml", MODEL.format(name="more"))

    # The watch begins some time after it is asked for: save until it is seen.
    async with asyncio.timeout(30):
        while not seen.done():
            save()
            if way == "removed" and not seen.done():
                write(tmp_path, "n.yaml", MODEL.format(name="n"))
            await asyncio.wait({seen}, timeout=0.5)
    await seen
    await changes.aclose()  # type: ignore[attr-defined]


def test_only_files_that_would_be_read_are_a_change() -> None:
    roots = [Path("/a/folder"), Path("/b/file.yaml")]
    ours = ["/a/folder/x.yaml", "/a/folder/y.yml", "/a/folder/z.json", "/b/file.yaml"]
    others = ["/a/folder/x.yaml~", "/a/folder/.x.yaml.swp", "/a/folder/deeper/x.yaml", "/b/other.yaml", "/a/x.yaml"]
    assert [path for path in ours + others if is_ours(roots, Path(path))] == ours
