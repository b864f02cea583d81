"""Damaged, cut, foreign and lying images are found out before anything of them is used."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinySpec

from naru_worker.adapters.images import header as header_module
from naru_worker.adapters.images.errors import ImageDamaged, LoadStopped
from naru_worker.adapters.images.header import PAGE_BYTES, ImageHeader, digest_of
from naru_worker.adapters.images.model_image import ModelImage


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[TinySpec], Path], pack_here: Callable[..., Path]
) -> bytes:
    """The bytes of a tiny model's image, biases included."""
    return pack_here(tiny_model(TinySpec(bias=True)), tmp_path_factory.mktemp("image")).read_bytes()


def header_of(image: bytes) -> ImageHeader:
    return ImageHeader.from_page(image[:PAGE_BYTES], len(image), "image")


def load(path: Path) -> None:
    """All that a load does with an image."""
    image = ModelImage(path)
    try:
        image.make_present(lambda ready: None, True, threading.Event())
        image.build_tokenizer()
    finally:
        image.close()


def assert_refused(path: Path, image: bytes, match: str | None = None) -> None:
    path.write_bytes(image)
    with pytest.raises(ImageDamaged, match=match) as caught:
        load(path)
    assert str(path) in caught.value.message


def test_any_damaged_byte_is_found(whole: bytes, tmp_path: Path) -> None:
    header = header_of(whole)
    ends = (0, PAGE_BYTES, header.weights_end, header.sums_offset, header.index_offset, len(whole))
    places = [*range(0, 210, 3)]
    for start, end in itertools.pairwise(ends):
        places += [start, end - 1, *random.Random(end).sample(range(start, end), 40)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        assert_refused(tmp_path / "damaged.naru", bytes(damaged))


def test_a_damaged_chunk_is_named(whole: bytes, tmp_path: Path) -> None:
    at = PAGE_BYTES + 2 * header_module.CHUNK_BYTES + 17
    damaged = whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
    assert_refused(tmp_path / "damaged.naru", damaged, match=r"chunk 2 of the weights \(bytes 135168 to")


def test_stages_before_the_damage_are_reported_and_none_after(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.naru"
    end = header_of(whole).weights_end
    path.write_bytes(whole[: end - 70000] + b"!" * 8 + whole[end - 70000 + 8 :])
    image = ModelImage(path)
    ready: list[int] = []
    with pytest.raises(ImageDamaged):
        image.make_present(ready.append, True, threading.Event())
    assert all(present <= end - 70000 for present in ready)
    image.close()


@pytest.mark.parametrize("size", [0, 1, 100, PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES, -1])
def test_a_cut_image_is_refused(whole: bytes, tmp_path: Path, size: int) -> None:
    assert_refused(tmp_path / "cut.naru", whole[:size])


def test_an_image_with_something_behind_it_is_refused(whole: bytes, tmp_path: Path) -> None:
    assert_refused(tmp_path / "long.naru", whole + b"\0", match="bytes; .* are needed")


def test_another_version_is_refused_by_its_number(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(header_module, "VERSION", 7)
        page = header_of_page(whole)
    assert_refused(tmp_path / "new.naru", page + whole[PAGE_BYTES:], match="layout version 7; this worker reads 2")


def header_of_page(whole: bytes) -> bytes:
    """The page again, as the format is now."""
    fields = whole[:PAGE_BYTES]
    end = int.from_bytes(fields[24:32], "little")
    tokenizer = int.from_bytes(fields[40:48], "little")
    index = int.from_bytes(fields[64:72], "little")
    return ImageHeader(end, tokenizer, index, fields[72:104], fields[104:136]).to_page()


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "model.gguf", b"GGUF" + bytes(8192), match="is no packed image")
    with pytest.raises(ImageDamaged, match="cannot be opened"):
        ModelImage(tmp_path / "missing.naru")
    with pytest.raises(ImageDamaged, match="not a regular file"):
        ModelImage(tmp_path)


def test_a_lying_header_is_refused(whole: bytes, tmp_path: Path) -> None:
    """Its own hash is right."""
    header = header_of(whole)
    lies: tuple[dict[str, Any], ...] = (
        {"weights_end": 2**62},
        {"weights_end": header.weights_end + 1},
        {"weights_end": 0},
        {"tokenizer_bytes": 2**62},
        {"tokenizer_bytes": header.tokenizer_bytes - 1},
        {"index_bytes": 0},
        {"index_bytes": 2**40},
    )
    for lie in lies:
        page = replace(header, **lie).to_page()
        assert_refused(tmp_path / "lie.naru", page + whole[PAGE_BYTES:])


def with_index(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The image with another index and hashes that fit."""
    header = header_of(whole)
    index = json.loads(whole[header.index_offset :])
    change(index)
    raw = json.dumps(index).encode()
    page = replace(header, index_bytes=len(raw), index_hash=digest_of(raw)).to_page()
    return page + whole[PAGE_BYTES : header.index_offset] + raw


def matrix(index: dict[str, Any], name: str = "layers.1.o") -> list[Any]:
    found: list[Any] = next(m for m in index["matrices"] if name in m[0])
    return found


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "segment behind the end": lambda i: matrix(i)[4][0].__setitem__(2, 2**40),
    "segment before the start": lambda i: matrix(i)[4][0].__setitem__(2, -64),
    "segment over another": lambda i: matrix(i)[4][0].__setitem__(2, 4096),
    "segment off its alignment": lambda i: matrix(i)[4][0].__setitem__(2, matrix(i)[4][0][2] + 4),
    "segment longer than its rows": lambda i: matrix(i)[4][0].__setitem__(3, matrix(i)[4][0][3] + 64),
    "more rows than bytes": lambda i: matrix(i)[4][0].__setitem__(1, 2**20),
    "rows that overflow": lambda i: matrix(i)[4][0].__setitem__(1, 2**31 - 1),
    "no rows": lambda i: matrix(i)[4][0].__setitem__(1, 0),
    "rows true": lambda i: matrix(i)[4][0].__setitem__(1, True),
    "rows a float": lambda i: matrix(i)[4][0].__setitem__(1, 64.0),
    "unknown format": lambda i: matrix(i)[4][0].__setitem__(0, 99),
    "other format": lambda i: matrix(i)[4][0].__setitem__(0, 1),
    "other columns": lambda i: matrix(i).__setitem__(2, 32),
    "columns null": lambda i: matrix(i).__setitem__(2, None),
    "bias behind the end": lambda i: matrix(i).__setitem__(3, 2**50),
    "bias without a name": lambda i: matrix(i).__setitem__(1, []),
    "bias of another": lambda i: matrix(i).__setitem__(1, ["layers.0.o_bias"]),
    "missing segment": lambda i: matrix(i, "layers.0.q")[4].pop(),
    "missing matrix": lambda i: i["matrices"].pop(),
    "matrix twice": lambda i: i["matrices"].append(i["matrices"][-1]),
    "matrix a number": lambda i: i["matrices"].append(5),
    "no matrices": lambda i: i.pop("matrices"),
    "vector behind the end": lambda i: i["vectors"]["final_norm"].__setitem__(0, 2**40),
    "vector longer than it is": lambda i: i["vectors"]["final_norm"].__setitem__(1, 2**61),
    "vector shorter than it is": lambda i: i["vectors"]["final_norm"].__setitem__(1, 3),
    "missing vector": lambda i: i["vectors"].pop("final_norm"),
    "vectors a list": lambda i: i.__setitem__("vectors", []),
    "stage ends behind the end": lambda i: i["stage_ends"].__setitem__(-1, 2**40),
    "stage ends descending": lambda i: i["stage_ends"].reverse(),
    "missing stage": lambda i: i["stage_ends"].pop(0),
    "another width": lambda i: i["config"].__setitem__("hidden_size", 128),
    "no layers": lambda i: i["config"].__setitem__("num_layers", 0),
    "many layers": lambda i: i["config"].__setitem__("num_layers", 10**9),
    "unknown architecture": lambda i: i["config"].__setitem__("architecture", "other"),
    "unknown config field": lambda i: i["config"].__setitem__("more", 1),
    "missing config field": lambda i: i["config"].pop("norm_eps"),
    "rope of zeros": lambda i: i["config"]["rope"].__setitem__("theta", 0.0),
    "rope wider than a head": lambda i: i["config"]["rope"].__setitem__("rotary_dim", 10**6),
    "windows of another count": lambda i: i["config"].__setitem__("sliding_windows", [1]),
    "flag a number": lambda i: i["config"].__setitem__("tie_word_embeddings", 1),
    "norms of heads that are not there": lambda i: i["config"].__setitem__("qk_norm", True),
    "norms of heads unknown": lambda i: i["config"].pop("qk_norm"),
    "no config": lambda i: i.__setitem__("config", None),
    "template a number": lambda i: i.__setitem__("chat_template", 3),
    "vocabulary limit above the embedding": lambda i: i.__setitem__("vocab_limit", 10**6),
    "tokenizer of negative size": lambda i: i.__setitem__("tokenizer_resident_bytes", -1),
    "key of another tokenizer": lambda i: i.__setitem__("tokenizer_key", "0" * 64),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_a_lying_index_is_refused(whole: bytes, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    assert_refused(tmp_path / "lie.naru", with_index(whole, change))


def test_an_index_written_again_is_fine(whole: bytes, tmp_path: Path) -> None:
    """So what the tests above change is what is refused."""
    path = tmp_path / "same.naru"
    path.write_bytes(with_index(whole, lambda index: None))
    load(path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b"\xff", b'{"a":NaN}', b"[" * 100_000])
def test_an_index_that_is_no_object_is_refused(whole: bytes, tmp_path: Path, raw: bytes) -> None:
    header = header_of(whole)
    page = replace(header, index_bytes=len(raw), index_hash=digest_of(raw)).to_page()
    assert_refused(tmp_path / "bad.naru", page + whole[PAGE_BYTES : header.index_offset] + raw)


def test_making_present_stops_when_told(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "whole.naru"
    path.write_bytes(whole)
    image = ModelImage(path)
    should_stop = threading.Event()
    ready: list[int] = []

    def stop(present: int) -> None:
        ready.append(present)
        should_stop.set()

    with pytest.raises(LoadStopped):
        image.make_present(stop, True, should_stop)
    assert 1 <= len(ready) < len(image.layer_ends())
    image.close()
