"""External data of ONNX files: found wherever a graph can hold it, and never outside the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_models import constant, doubler, model, save, value

from naru_proto.errors import LoadError
from naru_worker.adapters.onnx.graph_files import external_files


def refer(path: Path, location: str) -> Path:
    """A model whose weight is said to lie at `location`."""
    made = doubler()
    (tensor, _) = made.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("offset", "0"), ("location", location), ("length", "4")):
        tensor.external_data.add(key=key, value=text)
    path.write_bytes(made.SerializeToString())
    return path


def test_weights_beside_the_file_are_found(tmp_path: Path) -> None:
    path = save(doubler(), tmp_path / "m.onnx", data="weights.bin")
    assert external_files(path) == [tmp_path / "weights.bin"]
    assert external_files(save(doubler(), tmp_path / "n.onnx")) == []


def test_weights_of_graphs_within_graphs_are_found(tmp_path: Path) -> None:
    hidden = constant("w", [1.0, 2.0])
    hidden.ClearField("raw_data")
    hidden.data_location = TensorProto.EXTERNAL
    hidden.external_data.add(key="location", value="../secret")
    branch = helper.make_graph([helper.make_node("Identity", ["w"], ["o"])], "b", [], [value("o", [2])], [hidden])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    made = model([node], [value("c", [1], TensorProto.BOOL)], [value("y", [2])])
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    (tmp_path.parent / "secret").write_bytes(bytes(8))
    with pytest.raises(LoadError, match="outside its folder"):
        external_files(path)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "link", "sub/../../secret"])
def test_files_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "m"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(bytes(8))
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(LoadError, match="outside its folder"):
        external_files(refer(folder / "model.onnx", location))


@pytest.mark.parametrize("location", ["gone.bin", "", ".", "\0", "a" * 300])
def test_data_that_is_not_there_is_named(tmp_path: Path, location: str) -> None:
    with pytest.raises(LoadError, match=r"not there|outside its folder"):
        external_files(refer(tmp_path / "model.onnx", location))


@given(st.binary(max_size=60), st.integers(0, 200))
def test_damage_is_told_and_never_a_crash(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    whole = doubler().SerializeToString()
    path.write_bytes(whole[:place] + noise + whole[place + len(noise) :])
    try:
        assert external_files(path) == []
    except LoadError as error:
        assert "damaged" in error.message or "empty" in error.message or "not there" in error.message
