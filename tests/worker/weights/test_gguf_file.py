"""The GGUF reader takes right files apart exactly and answers wrong ones with an error that names file and field."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import F32, Q5_K, Q8_0, GgufTensor, Typed, build, f32, model_file, string
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TinySpec

from naru_proto.errors import LoadError
from naru_worker.adapters.weights.gguf_checkpoint import gguf_checkpoint
from naru_worker.adapters.weights.gguf_file import GgufFile

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return GgufFile(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 64])
def test_metadata_and_tensors_come_back_as_written(tmp_path: Path, version: int, alignment: int) -> None:
    metadata: dict[str, Any] = {
        "general.alignment": alignment,
        "n": 7,
        "negative": -3,
        "real": 0.5,
        "flag": True,
        "text": "čaj",
        "list": ["a", "", "ž"],
        "numbers": [1, 2, 3],
        "nested": Typed(9, struct.pack("<IQ", 9, 2) + struct.pack("<IQBB", 0, 2, 1, 2) + struct.pack("<IQ", 0, 0)),
        "big": Typed(10, struct.pack("<Q", 2**40)),
    }
    tensors = [f32("a", VALUES), GgufTensor("q", (2, 32), Q8_0, bytes(68)), f32("b", VALUES[0])]
    file = opened(tmp_path, build(metadata, tensors, version=version, alignment=alignment))
    assert file.metadata == metadata | {"nested": [[1, 2], []], "big": 2**40}
    assert np.array_equal(np.frombuffer(file.tensors["a"].data, "<f4").reshape(3, 4), VALUES)
    assert (file.tensors["q"].format, file.tensors["q"].shape, len(file.tensors["q"].data)) == ("q8_0", (2, 32), 68)
    assert np.array_equal(np.frombuffer(file.tensors["b"].data, "<f4"), VALUES[0])


def test_tensors_are_read_only_views_of_the_map(tmp_path: Path) -> None:
    tensor = opened(tmp_path, build({}, [f32("a", VALUES)])).tensors["a"]
    assert tensor.data.readonly
    assert type(tensor.data.obj).__name__ == "mmap"


HUGE = 2**62
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "three bytes": (b"GGU", "magic"),
    "other magic": (build({}, magic=b"GGML"), "magic"),
    "version 1": (build({}, version=1), "version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "header cut": (build({})[:10], "tensor_count"),
    "too many tensors": (build({}, num_tensors=HUGE), "tensor_count"),
    "too many keys": (build({}, num_keys=HUGE), "metadata_kv_count"),
    "a key missing": (build({"a": 1}, num_keys=2)[:-16], "metadata key number 1"),
    "giant key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE), "metadata key number 0 has"),
    "key past the end": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 9), "metadata key number 0 needs 9 bytes"),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("k") + struct.pack("<II", 4, 1)) * 2,
        "'k' is in the metadata twice",
    ),
    "key not UTF-8": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"\xff\xfe") + bytes(8), "UTF-8"),
    "string past the end": (build({"s": Typed(8, struct.pack("<Q", HUGE))}), "'s' needs"),
    "unknown value type": (build({"s": Typed(13, b"")}), "value type 13"),
    "array of a billion": (build({"s": Typed(9, struct.pack("<IQ", 4, 2**30))}), "'s' has 1073741824 elements"),
    "array longer than the file": (build({"s": Typed(9, struct.pack("<IQ", 4, 2**20))}), "'s' needs"),
    "strings that run out": (build({"s": Typed(9, struct.pack("<IQ", 8, 2**20))}), "'s'"),
    "string in an array past the end": (build({"s": Typed(9, struct.pack("<IQQ", 8, 1, HUGE))}), "past the file"),
    "string in an array not UTF-8": (build({"s": Typed(9, struct.pack("<IQ", 8, 1) + string(b"\xff"))}), "UTF-8"),
    "arrays nested too deep": (build({"s": Typed(9, struct.pack("<IQ", 9, 1) * 5)}), "deeper"),
    "alignment 0": (build({"general.alignment": 0}), "general.alignment"),
    "alignment 24": (build({"general.alignment": 24}), "general.alignment"),
    "alignment text": (build({"general.alignment": "32"}), "general.alignment"),
    "tensor twice": (build({}, [f32("a", VALUES), f32("a", VALUES)]), "tensor 'a' is listed twice"),
    "no dimensions": (build({}, [GgufTensor("a", (), F32, b"")]), "0 dimensions"),
    "five dimensions": (build({}, [GgufTensor("a", (1,) * 5, F32, bytes(4))]), "5 dimensions"),
    "axis of length 0": (build({}, [GgufTensor("a", (0, 4), F32, b"")]), "shape"),
    "product overflows": (build({}, [GgufTensor("a", (2**40, 2**40), F32, b"")]), "shape"),
    "unsupported type": (build({}, [GgufTensor("a", (256,), Q5_K, bytes(176))]), "Q5_K (13); supported are f32, f16"),
    "unknown type": (build({}, [GgufTensor("a", (4,), 99, bytes(16))]), "unknown (99)"),
    "row not whole blocks": (build({}, [GgufTensor("a", (2, 40), Q8_0, bytes(90))]), "multiples of 32"),
    "offset past the end": (build({}, [GgufTensor("a", (4,), F32, bytes(16), offset=2**40)]), "tensor 'a' ends"),
    "offset not aligned": (build({}, [GgufTensor("a", (4,), F32, bytes(64), offset=4)]), "alignment"),
    "tensors overlap": (
        build({}, [GgufTensor("a", (16,), F32, bytes(64), offset=0), GgufTensor("b", (4,), F32, bytes(64), offset=32)]),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "data cut": (build({}, [f32("a", VALUES)])[:-1], "tensor 'a' ends"),
    "data absent": (build({}, [f32("a", VALUES)])[:-64], "tensor 'a' ends"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_by_name_and_field(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    with pytest.raises(LoadError) as caught:
        opened(tmp_path, content)
    assert message in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("absent.gguf", ".", "pipe.gguf"):
        with pytest.raises(LoadError):
            GgufFile(tmp_path / name)


SMALL = model_file(TinySpec(hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, num_layers=1))


def test_every_cut_of_a_model_is_refused(tmp_path: Path) -> None:
    for length in range(0, len(SMALL), 97):
        with pytest.raises(LoadError):
            gguf_checkpoint(opened(tmp_path, SMALL[:length]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_change_of_bytes_does_worse_than_a_load_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(SMALL)
    header_bytes = len(SMALL) // 2
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[at : at + len(patch)] = patch
    try:
        checkpoint = gguf_checkpoint(opened(tmp_path_factory.getbasetemp(), bytes(content)))
    except LoadError:
        return
    checkpoint.get("layers.0.q")
    checkpoint.close()
