"""Encoders' files, whole and broken: what is read of them, and what is refused with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_encoders import TinyEncoder, write_encoder

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.kinds import Kind, kind_of
from naru_worker.adapters.fetch.choosing import choose_files, flat_path, pick_model
from naru_worker.adapters.weights.encoder_folder import EncoderCheckpoint, read_encoder_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_encoder(tmp_path, TinyEncoder(normalize=True, num_layers=1))


def change(path: Path, **values: Any) -> None:
    """Lays values over a JSON file, which need not exist; None takes a key away."""
    held = json.loads(path.read_text()) if path.exists() else {}
    held |= values
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))


def test_what_lies_beside_the_weights_is_honoured(folder: Path) -> None:
    change(folder / "sentence_bert_config.json", max_seq_length=20, do_lower_case=False)
    config = read_encoder_config(folder)
    assert (config.pooling, config.normalize, config.max_tokens, config.task) == ("mean", True, 20, "embed")
    (folder / "modules.json").unlink()
    (folder / "1_Pooling" / "config.json").unlink()
    (folder / "sentence_bert_config.json").unlink()
    plain = read_encoder_config(folder)
    assert (plain.pooling, plain.normalize, plain.max_tokens) == ("mean", False, 80)
    assert kind_of(folder) is Kind.ENCODER


@pytest.mark.parametrize(
    ("said", "is_sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
    ],
)
def test_a_cross_encoders_activation_is_as_its_files_say(
    tmp_path: Path, said: dict[str, Any], is_sigmoid: bool
) -> None:
    write_encoder(tmp_path, TinyEncoder(num_labels=1, num_layers=1))
    change(tmp_path / "config.json", **said)
    config = read_encoder_config(tmp_path)
    assert (config.task, config.width, config.is_sigmoid) == ("score", 1, is_sigmoid)


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("config.json", {"model_type": "mpnet"}, "model_type is 'mpnet'"),
        ("config.json", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("config.json", {"is_decoder": True}, "is_decoder is true"),
        ("config.json", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("config.json", {"hidden_size": 65}, "hidden_size is 65"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("config.json", {"layer_norm_eps": "small"}, "layer_norm_eps is 'small'"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token is set beside"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 7}, "word_embedding_dimension is 7"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is true"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name is set"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    folder: Path, file: str, values: dict[str, Any], reason: str
) -> None:
    change(folder / file, **values)
    with pytest.raises(LoadError, match=reason):
        read_encoder_config(folder)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ('[{"type": "sentence_transformers.models.Transformer"}]', "of no module is Pooling"),
        ('[{"type": "a.Transformer"}, {"type": "a.Pooling"}, {"type": "a.Dense"}]', "is 'Dense'"),
        ('[{"type": "a.Pooling"}, {"type": "a.Transformer"}]', "the order must be"),
        ('[{"path": ""}]', "is missing"),
        ('{"type": 1}', "a list of modules is needed"),
        ("[", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_modules_that_are_not_understood_are_refused(folder: Path, listed: str, reason: str) -> None:
    (folder / "modules.json").write_text(listed)
    with pytest.raises(LoadError, match=reason):
        read_encoder_config(folder)


def rewrite(folder: Path, **changed: Any) -> None:
    """Puts tensors in place of others; None takes one away."""
    tensors = load_file(folder / "model.safetensors") | changed
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def test_damaged_weights_are_refused_with_the_tensors_name(folder: Path) -> None:
    name = "encoder.layer.0.output.dense.weight"
    whole = load_file(folder / "model.safetensors")
    rewrite(folder, **{name: None})
    with pytest.raises(LoadError, match=f"{name}' is missing"):
        EncoderCheckpoint(folder)
    rewrite(folder, **{name: whole[name].T.copy()})
    with pytest.raises(LoadError, match="has shape"):
        EncoderCheckpoint(folder)
    rewrite(folder, **{name: whole[name].astype(np.int32)})
    with pytest.raises(LoadError, match="is I32; it must be F32, F16 or BF16"):
        EncoderCheckpoint(folder)
    broken = whole[name].copy()
    broken[3, 4] = np.nan
    rewrite(folder, **{name: broken})
    checkpoint = EncoderCheckpoint(folder)
    with pytest.raises(LoadError, match=f"{name}' holds NaN or infinity"):
        list(checkpoint.tensors())
    checkpoint.close()


def test_half_precision_and_old_names_give_the_same_tensors(folder: Path) -> None:
    checkpoint = EncoderCheckpoint(folder)
    before = dict(checkpoint.tensors())
    checkpoint.close()
    tensors = load_file(folder / "model.safetensors")
    old = {"weight": "gamma", "bias": "beta"}
    renamed = {}
    for name, value in tensors.items():
        head, _, tail = name.rpartition(".")
        renamed[f"bert.{head}.{old[tail]}" if head.endswith("LayerNorm") else f"bert.{name}"] = value.astype(np.float16)
    save_file(renamed, folder / "model.safetensors")
    checkpoint = EncoderCheckpoint(folder)
    after = dict(checkpoint.tensors())
    checkpoint.close()
    assert after.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=1e-3, atol=1e-4)


def test_the_settings_of_modules_are_fetched_with_the_model() -> None:
    inside = ["model.safetensors", "config.json", "1_Pooling/config.json", "2_Normalize/config.json"]
    others = ["onnx/config.json", "1_Pooling/notes.json", "1_Pooling/deep/config.json", "README.md"]
    assert sorted(choose_files([*inside, *others], "", "m", "hf://m")) == sorted(inside)
    entry, names = pick_model([f"pkg/model/{name}" for name in (*inside, *others)], "", "m")
    assert entry == "pkg/model" and sorted(names) == sorted(f"pkg/model/{name}" for name in inside)
    assert flat_path("1_Pooling/config.json", "") == "1_Pooling/config.json"
    assert flat_path("deep/config.json", "") == "config.json"
