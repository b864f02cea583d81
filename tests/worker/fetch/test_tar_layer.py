"""Hostile and damaged tar layers: nothing is written outside, nothing grows without bound."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import tar_layer
from naru_worker.adapters.fetch.artifact import LayerForm
from naru_worker.adapters.fetch.tar_layer import unpack_layer


def member(name: str, body: bytes = b"GGUF", kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(body) if kind == tarfile.REGTYPE else 0
    return info


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, body in members:
            archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def unpack(tmp_path: Path, content: bytes, form: LayerForm = "tar", folder: str = "") -> Path:
    blob, target = tmp_path / "blob", tmp_path / "target"
    blob.write_bytes(content)
    target.mkdir(exist_ok=True)
    unpack_layer(blob, form, folder, target, "oci://r/a:v1", lambda done: None)
    return target


def outside(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("*.gguf") if "target" not in path.relative_to(tmp_path).parts]


@pytest.mark.parametrize("name", ["../m.gguf", "a/../../m.gguf", "/m.gguf", "a\\m.gguf", "./../m.gguf", "a\n.gguf"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LoadError, match="leads out of the artifact"):
        unpack(tmp_path, tar_of((member(name), b"GGUF")))
    assert outside(tmp_path) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_the_place_of_a_model_are_refused(tmp_path: Path, kind: bytes) -> None:
    with pytest.raises(LoadError, match="is a link or no plain file"):
        unpack(tmp_path, tar_of((member("m.gguf", kind=kind, link="/etc/passwd"), b"")))
    assert list((tmp_path / "target").iterdir()) == []


def test_a_link_cannot_redirect_what_comes_after_it(tmp_path: Path) -> None:
    """Links of other names are never made, so a path through one is an ordinary folder."""
    content = tar_of((member("dir", kind=tarfile.SYMTYPE, link=".."), b""), (member("dir/m.gguf"), b"GGUF"))
    target = unpack(tmp_path, content)
    assert (target / "dir" / "m.gguf").read_bytes() == b"GGUF"
    assert outside(tmp_path) == []


def test_only_files_of_a_model_are_written_and_modes_and_owners_are_not_taken_over(tmp_path: Path) -> None:
    info = member("m.gguf")
    info.mode, info.uid = 0o6777, 12345
    content = tar_of(
        (info, b"GGUF"), (member("setup.py"), b"evil"), (member("bin/sh"), b"evil"), (member("c.json"), b"{ }}")
    )
    target = unpack(tmp_path, content)
    assert sorted(path.name for path in target.rglob("*")) == ["c.json", "m.gguf"]
    stat = (target / "m.gguf").stat()
    assert (stat.st_mode & 0o6111, stat.st_uid) == (0, (tmp_path).stat().st_uid)


def test_a_bomb_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_layer, "_MIN_LIMIT_BYTES", 1 << 20)
    content = gzip.compress(tar_of((member("m.gguf", bytes(64 << 20)), bytes(64 << 20))), 9)
    with pytest.raises(LoadError, match="it unpacks to far more than it is"):
        unpack(tmp_path, content, "tar+gzip")
    assert (tmp_path / "target" / "m.gguf").stat().st_size < 100 * len(content) + (1 << 21)


def header(name: str, size_field: bytes, kind: bytes) -> bytes:
    """A raw header whose size says what it likes."""
    block = bytearray(512)
    block[0:100] = name.encode().ljust(100, b"\0")
    block[100:108] = b"0000644\0"
    block[124:136] = size_field
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("x", b"77777777777\0", b"x") + bytes(1024), "bytes at once"),
        (header("././@LongLink", b"77777777777\0", b"L") + bytes(1024), "bytes at once"),
        (header("m.gguf", b"\xff" * 8 + struct.pack(">i", -512), b"0") + bytes(1024), "negative|damaged"),
        (header("m.gguf", b"00000002000\0", b"0") + b"only this", "damaged"),
        (header("x", b"00000000000\0", b"x") * 3000, "damaged|not|no model"),
        (b"no tar at all" * 100, "damaged"),
        (b"", "damaged"),
    ],
    ids=["pax", "long name", "negative", "cut", "chain", "text", "empty"],
)
def test_damaged_and_lying_headers_are_sentences(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        unpack(tmp_path, content)


def test_a_cut_or_wrong_compression_is_a_sentence(tmp_path: Path) -> None:
    whole = gzip.compress(tar_of((member("m.gguf", bytes(100_000)), bytes(100_000))))
    for content in (whole[: len(whole) // 2], zlib.compress(b"x"), b"x" + whole):
        with pytest.raises(LoadError, match="damaged"):
            unpack(tmp_path, content, "tar+gzip")


def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_layer, "_MAX_MEMBERS", 10)
    with pytest.raises(LoadError, match="over 10 members"):
        unpack(tmp_path, tar_of(*[(member(f"{i}.json", b""), b"") for i in range(11)]))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), max_size=12), cut=st.integers(0, 4096))
def test_no_damage_crashes_or_writes_outside(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(
        tar_of((member("a/m.gguf"), b"GGUF"), (member("b.json"), b"{ }}"), (member("x" * 200), b"GGUF"))
    )
    for at, value in edits:
        content[at % len(content)] = value
    try:
        unpack(tmp_path, bytes(content[: cut or None]))
    except LoadError:
        pass
    assert outside(tmp_path) == []
