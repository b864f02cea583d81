"""What a model's files say of its shape, without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from gguf_builder import Q4_0, model_file
from tiny_experts import Kind, expert_gguf, write_experts
from tiny_models import TinySpec, config_of, write_model

from naru_proto.errors import LoadError
from naru_proto.shapes import ModelShape, num_parameters
from naru_worker.adapters.weights.describing import describe
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.core.weight_layout import expected_shapes

SPECS = [
    TinySpec(num_kv_heads=1, bias=True),
    TinySpec(model_type="qwen2", tied=True),
    TinySpec(model_type="qwen3", head_dim=32),
    TinySpec(model_type="gpt2", num_kv_heads=4, tied=True),
    TinySpec(model_type="mistral", head_dim=8),
]


@pytest.mark.parametrize("spec", SPECS, ids=[spec.model_type for spec in SPECS])
def test_the_shape_has_as_many_parameters_as_the_files_have_weights(spec: TinySpec, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, spec)
    checkpoint = open_checkpoint(folder)
    counted = sum(prod(shape) for shape in expected_shapes(checkpoint.config).values())
    checkpoint.close()
    whole = describe(folder)
    assert num_parameters(ModelShape(**whole["shape"])) == counted
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert describe(folder) == whole


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_mixtures_are_counted_with_all_their_experts(kind: Kind, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_experts(folder, kind, plain_layers=() if kind == "mixtral" else (0,))
    checkpoint = open_checkpoint(folder)
    counted = sum(prod(shape) for shape in expected_shapes(checkpoint.config).values())
    shape = ModelShape(**describe(folder)["shape"])
    assert num_parameters(shape) == counted and shape.num_plain_layers == (kind != "mixtral")
    path = tmp_path / "model.gguf"
    path.write_bytes(expert_gguf(kind, types={"_exps.weight": Q4_0, "down_shexp.weight": Q4_0}))
    assert describe(path)["weights"] == "q4_0"


def test_a_gguf_file_says_what_its_config_does_and_the_format_of_its_layers(tmp_path: Path) -> None:
    spec = TinySpec(num_kv_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec) | {"torch_dtype": "float32"}))
    path = tmp_path / "model.gguf"
    path.write_bytes(model_file(spec))
    of_file, of_config = describe(path), describe(tmp_path)
    assert of_file == of_config
    assert (of_file["weights"], of_file["windows"], of_file["max_context"]) == ("bf16", [], spec.max_positions)


@pytest.mark.parametrize(
    ("extra", "weights"),
    [
        ({"torch_dtype": "float16"}, "f16"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({}, "bf16"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, ""),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitnet"}}, ""),
    ],
)
def test_the_format_of_a_folder_is_its_configs(extra: dict[str, object], weights: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(TinySpec()) | extra))
    assert describe(tmp_path)["weights"] == weights


def test_windows_are_told_by_layer_and_an_open_one_is_0(tmp_path: Path) -> None:
    spec = TinySpec(model_type="mistral", extra={"sliding_window": 64, "layer_types": None})
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec)))
    assert describe(tmp_path)["windows"] == [64, 64]
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config_of(spec) | layers))
    assert describe(tmp_path)["windows"] == [64, 0]


def test_what_is_no_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="has no weights"):
        describe(tmp_path)
    with pytest.raises(LoadError, match="does not exist"):
        describe(tmp_path / "gone")
    (tmp_path / "config.json").write_text(json.dumps(config_of(TinySpec()) | {"torch_dtype": "int8"}))
    with pytest.raises(LoadError, match="torch_dtype is 'int8'; known are bfloat16, float16, float32"):
        describe(tmp_path)


def test_the_process_prints_a_description_or_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "naru_worker.adapters.weights", str(tmp_path)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"] == "model_load_failed"
    (tmp_path / "config.json").write_text(json.dumps(config_of(TinySpec())))
    assert json.loads(subprocess.check_output(command)) == describe(tmp_path)
