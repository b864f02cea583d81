"""What kind of model lies in a folder, told by names and config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.kinds import Kind, kind_of


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["model.safetensors", "config.json:llama"], Kind.DECODER),
        (["model.safetensors", "config.json:bert"], Kind.ENCODER),
        (["a.gguf", "model.onnx"], Kind.DECODER),
        (["model.safetensors", "config.json:bert", "model.onnx", "config.pbtxt"], Kind.ENCODER),
        (["model.onnx", "config.json:bert"], Kind.ONNX),
        (["config.pbtxt"], Kind.ONNX),
        (["3/model.onnx"], Kind.ONNX),
        (["03/model.onnx", "x/model.onnx", "config.json:llama"], Kind.DECODER),
        ([], Kind.DECODER),
    ],
)
def test_a_folder_is_told_by_what_is_in_it(tmp_path: Path, names: list[str], kind: Kind) -> None:
    for named in names:
        name, _, model_type = named.partition(":")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"model_type": model_type}))
    assert kind_of(tmp_path) is kind


def test_a_file_is_told_by_its_name(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "a.ONNX") is Kind.ONNX
    assert kind_of(tmp_path / "a.gguf") is Kind.DECODER


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LoadError, match="an object is needed"):
        kind_of(tmp_path)
