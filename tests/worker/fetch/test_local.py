"""``file://``: what is taken as it lies, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import fetch
from naru_worker.settings import FetchSettings


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    make(tmp_path, "a b.gguf")
    found = fetch(f"file://{tmp_path}/a%20b.gguf")
    assert found.path == tmp_path / "a b.gguf"
    assert found.digest.startswith("stat:")


def test_a_folder_with_safetensors_is_itself_even_beside_a_gguf(tmp_path: Path) -> None:
    assert fetch(f"file://{make(tmp_path / 'm', 'model.safetensors', 'config.json', 'a.gguf')}").path == tmp_path / "m"


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    assert fetch(f"file://{make(tmp_path / 'm', 'a.gguf', 'readme.md')}").path == tmp_path / "m" / "a.gguf"


def test_onnx_models_are_taken_as_they_lie(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "config.pbtxt")
    make(folder / "1", "model.onnx")
    first = fetch(f"file://{folder}")
    assert first.path == folder
    make(folder / "2", "model.onnx")
    assert fetch(f"file://{folder}").digest != first.digest, "a version more is another model"
    assert fetch(f"file://{folder}/1/model.onnx").path == folder / "1" / "model.onnx"
    assert fetch(f"file://{make(tmp_path / 'n', 'any.onnx', 'any.onnx_data')}").path == tmp_path / "n"


def test_the_digest_changes_with_the_file(tmp_path: Path) -> None:
    make(tmp_path, "a.gguf")
    before = fetch(f"file://{tmp_path}/a.gguf").digest
    assert fetch(f"file://{tmp_path}/a.gguf").digest == before
    os.utime(tmp_path / "a.gguf", ns=(1, 1))
    assert fetch(f"file://{tmp_path}/a.gguf").digest != before


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [
        ([], "/missing", "does not exist"),
        (["pytorch_model.bin"], "", "a pickle runs code"),
        (["x.pt"], "/x.pt", "a pickle runs code"),
        (["a.safetensors"], "/a.safetensors", "give the folder"),
        (["a.gguf", "b.gguf"], "", r"2 GGUF files \(a.gguf, b.gguf\)"),
        (["a.txt"], "/a.txt", "no .gguf file"),
        ([], "", "no .gguf file"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, names: list[str], path: str, message: str) -> None:
    folder = make(tmp_path / "m", *names)
    with pytest.raises(LoadError, match=message):
        fetch(f"file://{folder}{path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "a.gguf")
    folder.chmod(0)
    try:
        with pytest.raises(LoadError, match="make it readable"):
            fetch(f"file://{folder}")
    finally:
        folder.chmod(0o700)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_a_claims_files_are_read_in_place(tmp_path: Path) -> None:
    make(tmp_path / "claim")
    folder = make(tmp_path / "claim" / "llama", "model.safetensors", "config.json")
    settings = FetchSettings(claims_dir=str(tmp_path))
    assert fetch("pvc://claim/llama", settings=settings, home=tmp_path / "home").path == folder
    assert not (tmp_path / "home").exists()


def test_links_inside_a_claim_are_followed_and_those_that_lead_out_refused(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "secret.gguf")
    make(tmp_path / "claim")
    make(tmp_path / "claim" / "blobs", "abc")
    for name, target in (("in", "../blobs/abc"), ("out", "../../elsewhere/secret.gguf")):
        make(tmp_path / "claim" / name)
        (tmp_path / "claim" / name / "m.gguf").symlink_to(target)
    settings = FetchSettings(claims_dir=str(tmp_path))
    assert fetch("pvc://claim/in", settings=settings).path == tmp_path / "claim" / "in" / "m.gguf"
    with pytest.raises(LoadError, match="leads out of the claim"):
        fetch("pvc://claim/out", settings=settings)


def test_a_claim_that_is_not_mounted_says_where_to_list_it(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"claim 'claim' is not mounted .*WorkerPool.spec.claims"):
        fetch("pvc://claim/llama", settings=FetchSettings(claims_dir=str(tmp_path)))
    make(tmp_path / "claim")
    with pytest.raises(LoadError, match="claim 'claim' has no 'llama'"):
        fetch("pvc://claim/llama", settings=FetchSettings(claims_dir=str(tmp_path)))
