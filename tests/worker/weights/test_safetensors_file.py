"""The safetensors reader takes right files apart exactly and refuses every lie in the header."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from naru_proto.errors import LoadError
from naru_worker.adapters.weights.safetensors_file import SafetensorsFile, other_dtypes


def opened(folder: Path, content: bytes) -> SafetensorsFile:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return SafetensorsFile(path)


def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_the_library_writes_comes_back(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "mask": np.ones((2, 2), bool),
        "empty": np.zeros((0, 4), np.float32),
    }
    file = opened(tmp_path, save(arrays, metadata={"format": "pt"}))
    assert np.array_equal(np.frombuffer(file.tensors["a"].data, "<f4").reshape(2, 3), arrays["a"])
    assert (file.tensors["b"].format, file.tensors["b"].shape) == ("f16", (4,))
    assert file.tensors["empty"].shape == (0, 4)
    assert other_dtypes(file.stored) == {"mask": "BOOL"} and bytes(file.stored["mask"].data) == b"\1" * 4
    assert file.tensors["a"].data.readonly


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "header needs 8 bytes"),
    "giant header": (struct.pack("<Q", 2**63) + b"{}", "header claims"),
    "header past the end": (build(b"{}", length=3), "header claims 3 bytes"),
    "not JSON": (build(b"nonsense"), "not valid JSON"),
    "not UTF-8": (build(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (build([]), "an object is needed"),
    "nested without end": (build(b"[" * 100_000), "header"),
    "entry is a number": (build({"a": 1}), "tensor 'a' is 1"),
    "unknown dtype": (build({"a": entry("F7")}, bytes(8)), "tensor 'a' has dtype 'F7'"),
    "dtype is a list": (build({"a": entry([])}, bytes(8)), "dtype"),
    "wrong dtype for the length": (build({"a": entry("F16")}, bytes(8)), "F16 of shape [2] has 4"),
    "negative size": (build({"a": entry(shape=[-2])}, bytes(8)), "shape"),
    "size is true": (build({"a": entry(shape=[True, 2])}, bytes(8)), "shape"),
    "size is a float": (build({"a": entry(shape=[2.0])}, bytes(8)), "shape"),
    "sizes overflow": (build({"a": entry(shape=[2**40, 2**40])}, bytes(8)), "shape"),
    "offsets reversed": (build({"a": entry(offsets=[8, 0])}, bytes(8)), "data_offsets"),
    "one offset": (build({"a": entry(offsets=[8])}, bytes(8)), "data_offsets"),
    "offsets missing": (build({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "data_offsets"),
    "offsets past the end": (build({"a": entry(offsets=[0, 8])}, bytes(7)), "the file is cut or lying"),
    "offset far away": (build({"a": entry(offsets=[2**50, 2**50 + 8])}, bytes(8)), "leaving a hole"),
    "overlap": (
        build({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
        "tensor 'b' starts at 4 and overlaps tensor 'a'",
    ),
    "same place twice": (build({"a": entry(), "b": entry()}, bytes(8)), "overlaps"),
    "hole": (build({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "leaving a hole"),
    "hole at the start": (build({"a": entry(offsets=[4, 12])}, bytes(12)), "leaving a hole"),
    "bytes left over": (build({"a": entry()}, bytes(9)), "data has 9 bytes, but the tensors fill 8"),
    "name twice": (
        build(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8)),
        "the key 'a' is there twice",
    ),
    "NaN": (build(b'{"a": NaN}'), "NaN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_name_and_field(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    with pytest.raises(LoadError) as caught:
        opened(tmp_path, content)
    assert message in str(caught.value)
    assert "model.safetensors" in str(caught.value)


GOOD = save({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)})


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=6), st.integers(0, len(GOOD)))
def test_no_change_of_bytes_does_worse_than_a_load_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, patch: bytes, keep: int
) -> None:
    content = bytearray(GOOD)
    content[at : at + len(patch)] = patch
    for candidate in (bytes(content), bytes(content[:keep])):
        try:
            file = opened(tmp_path_factory.getbasetemp(), candidate)
        except LoadError:
            continue
        assert sum(len(t.data) for t in file.tensors.values()) <= len(candidate)
        file.close()
