"""Checkpoints offer the right tensors under canonical names, from folders and GGUF files alike, or refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf_builder import build, f32, model_file, model_metadata, model_tensors
from safetensors.numpy import save_file
from tiny_models import TinySpec, Weights, config_of, weights_of, write_json, write_model

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.weights.mapped_checkpoint import MappedCheckpoint
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.core.weight_layout import expected_shapes

LLAMA, QWEN, GPT2 = TinySpec(), TinySpec("qwen2"), TinySpec("gpt2", num_kv_heads=4, tied=True)
QWEN3 = TinySpec("qwen3", head_dim=32)


def values(checkpoint: MappedCheckpoint, name: str) -> npt.NDArray[np.float32]:
    tensor = checkpoint.get(name)
    assert tensor.data.readonly and len(tensor.data) == dequantize(tensor).nbytes
    return dequantize(tensor)


def folder_with(folder: Path, spec: TinySpec, change: Any = None) -> Path:
    """A model folder whose weights went through `change`."""
    weights = write_model(folder, spec)
    if change is not None:
        save_file(change(weights), folder / "model.safetensors")
    return folder


def test_a_llama_folder_gives_the_files_own_bytes(tmp_path: Path) -> None:
    weights = write_model(tmp_path, LLAMA)
    checkpoint = open_checkpoint(tmp_path)
    assert np.array_equal(values(checkpoint, "layers.1.q"), weights["model.layers.1.self_attn.q_proj.weight"])
    assert np.array_equal(values(checkpoint, "embed"), weights["model.embed_tokens.weight"])
    assert np.array_equal(values(checkpoint, "lm_head"), weights["lm_head.weight"])
    assert type(checkpoint.get("layers.1.q").data.obj).__name__ == "mmap", "copied without need"
    assert checkpoint.ignored_tensors == ()


def test_gpt2_projections_are_turned_and_split(tmp_path: Path) -> None:
    weights = write_model(tmp_path, GPT2)
    checkpoint = open_checkpoint(tmp_path)
    fused = weights["transformer.h.0.attn.c_attn.weight"]
    for i, name in enumerate("qkv"):
        assert np.array_equal(values(checkpoint, f"layers.0.{name}"), fused[:, 64 * i : 64 * (i + 1)].T)
        bias = weights["transformer.h.0.attn.c_attn.bias"][64 * i : 64 * (i + 1)]
        assert np.array_equal(values(checkpoint, f"layers.0.{name}_bias"), bias)
    assert np.array_equal(values(checkpoint, "layers.1.down"), weights["transformer.h.1.mlp.c_proj.weight"].T)


def test_gpt2_names_work_without_their_prefix(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2, lambda w: {k.removeprefix("transformer."): v for k, v in w.items()})
    assert open_checkpoint(folder).get("pos_embed").shape == (256, 64)


@pytest.mark.parametrize(
    "spec", [LLAMA, TinySpec(bias=True), QWEN, QWEN3, GPT2], ids=["llama", "biases", "qwen2", "qwen3", "gpt2"]
)
def test_gguf_and_folder_of_one_model_hold_the_same_tensors(tmp_path: Path, spec: TinySpec) -> None:
    write_model(tmp_path, spec)
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file(spec))
    ours, gguf = open_checkpoint(tmp_path), open_checkpoint(path)
    for name in expected_shapes(gguf.config):
        assert np.array_equal(values(ours, name), values(gguf, name)), name
    assert (ours.config.rope, ours.config.vocab_size, ours.config.tie_word_embeddings) == (
        gguf.config.rope,
        gguf.config.vocab_size,
        gguf.config.tie_word_embeddings,
    )


def tied(spec_tied: bool, head: bool) -> Any:
    def change(weights: Weights) -> Weights:
        rest = {k: v for k, v in weights.items() if k != "lm_head.weight"}
        return rest | ({"lm_head.weight": np.full((259, 64), 9, np.float32)} if head else {})

    return TinySpec(tied=spec_tied), change


def test_tied_models_use_the_embedding_whether_or_not_a_head_is_there(tmp_path: Path) -> None:
    for head in (False, True):
        spec, change = tied(True, head)
        folder = tmp_path / str(head)
        folder.mkdir()
        checkpoint = open_checkpoint(folder_with(folder, spec, change))
        assert not checkpoint.has("lm_head")
        assert checkpoint.ignored_tensors == (("lm_head.weight",) if head else ())


def test_untied_models_use_their_head_and_fail_without(tmp_path: Path) -> None:
    spec, with_head = tied(False, True)
    assert values(open_checkpoint(folder_with(tmp_path, spec, with_head)), "lm_head").max() == 9
    spec, without_head = tied(False, False)
    with pytest.raises(LoadError, match=r"tensor 'lm_head.weight' is missing"):
        open_checkpoint(folder_with(tmp_path, spec, without_head))


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_layer_tensor_is_named_and_an_unknown_one_is_noted(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=f"tensor '{K_PROJ}' is missing"):
        open_checkpoint(folder_with(tmp_path, LLAMA, lambda w: {k: v for k, v in w.items() if k != K_PROJ}))
    extra = {"surplus": np.zeros(3, np.float32)}
    assert open_checkpoint(folder_with(tmp_path, LLAMA, lambda w: w | extra)).ignored_tensors == ("surplus",)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((32, 32), np.float32), r"has shape \(32, 32\), but the config needs \(32, 64\)"),
        (np.zeros((32, 64, 1), np.float32), "has shape"),
        (np.zeros((32, 64), np.int8), "is I8; it must be F32, F16 or BF16"),
        (np.zeros((32, 64), np.float64), "is F64"),
    ],
)
def test_a_tensor_of_the_wrong_shape_or_dtype_is_refused(tmp_path: Path, array: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        open_checkpoint(folder_with(tmp_path, LLAMA, lambda w: w | {K_PROJ: array}))
    assert K_PROJ in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, r"q_norm.weight' is missing"),
        (np.ones(128, np.float32), r"has shape \(128,\), but the config needs \(32,\)"),
        (np.ones(16, np.float32), r"has shape \(16,\), but the config needs \(32,\)"),
        (np.ones((32, 1), np.float32), r"has shape \(32, 1\), but the config needs \(32,\)"),
    ],
)
def test_a_norm_of_heads_of_another_width_or_none_is_refused(tmp_path: Path, array: Any, message: str) -> None:
    name = "model.layers.1.self_attn.q_norm.weight"

    def change(weights: Weights) -> Weights:
        return {k: v for k, v in weights.items() if k != name} | ({} if array is None else {name: array})

    with pytest.raises(LoadError, match=message) as caught:
        open_checkpoint(folder_with(tmp_path, QWEN3, change))
    assert caught.value.param == name


def test_a_gguf_files_norm_of_heads_of_another_width_or_none_is_refused(tmp_path: Path) -> None:
    path, name = tmp_path / "m.gguf", "blk.0.attn_k_norm.weight"
    rest = [tensor for tensor in model_tensors(QWEN3) if tensor.name != name]
    for tensors in (rest, [*rest, f32(name, np.ones(31, np.float32))]):
        path.write_bytes(build(model_metadata(QWEN3), tensors))
        with pytest.raises(LoadError, match="attn_k_norm") as caught:
            open_checkpoint(path)
        assert caught.value.param == name


def test_half_precision_tensors_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, GPT2, lambda w: {k: v.astype(np.float16) for k, v in w.items()})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.get("layers.0.q").format == "f16"
    expected = weights_of(GPT2)["transformer.h.0.attn.c_attn.weight"].astype(np.float16)[:, :64].T
    assert np.array_equal(dequantize(checkpoint.get("layers.0.q")), expected.astype(np.float32))


def sharded(folder: Path, weight_map: dict[str, Any] | None = None) -> Path:
    weights = write_model(folder, LLAMA)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {name: file for file, held in shards.items() for name in held}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index | (weight_map or {})})
    return folder


def test_shards_are_joined_by_the_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path))
    for name, array in weights_of(LLAMA).items():
        if "q_proj" in name:
            layer = name.split(".")[2]
            assert np.array_equal(values(checkpoint, f"layers.{layer}.q"), array)


@pytest.mark.parametrize(
    "shard",
    [
        "../b.safetensors",
        "/etc/passwd",
        "sub/b.safetensors",
        "b.bin",
        "",
        "..",
        7,
        None,
        "b\0.safetensors",
        "c.safetensors",
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"")
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(LoadError):
        open_checkpoint(sharded(folder, {K_PROJ: shard}))


def test_an_index_that_lies_about_a_tensor_names_it(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="tensor 'ghost' is missing, though the index puts it here"):
        open_checkpoint(sharded(tmp_path, {"ghost": "a.safetensors"}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_is_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04.")
    path.chmod(0)
    for given in (path, tmp_path):
        with pytest.raises(LoadError, match="pickle file, which can run any code"):
            open_checkpoint(given)


def test_safetensors_win_over_pickle_beside_them(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert open_checkpoint(tmp_path).config.num_layers == 2


def test_what_lies_at_a_path_is_told(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(LoadError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "one.gguf").write_bytes(model_file(LLAMA))
    assert open_checkpoint(tmp_path).config.architecture == "llama"
    (tmp_path / "two.gguf").write_bytes(model_file(LLAMA))
    with pytest.raises(LoadError, match="has 2 GGUF files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"a": 1, "a": 2}', "\x00", '{"a": 1' + "0" * 5000 + "}"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_broken_json_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    write_model(tmp_path, LLAMA)
    (tmp_path / name).write_text(content)
    with pytest.raises(LoadError, match=name):
        open_checkpoint(tmp_path)


def test_a_folder_or_pipe_in_place_of_a_config_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    for make in (Path.mkdir, os.mkfifo):
        path = tmp_path / "generation_config.json"
        make(path)
        with pytest.raises(LoadError, match=r"generation_config.json: is not a regular file"):
            open_checkpoint(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"])
def test_an_impossible_path_is_refused(path: str) -> None:
    with pytest.raises(LoadError):
        open_checkpoint(Path(path))


ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 7, 2**31, 2**70, 1e308, -0.5, "", "x", [], ["a"], {}, {"a": []}, [[1]])


@pytest.mark.parametrize(
    "spec",
    [TinySpec(extra={"rope_scaling": {"type": "linear", "factor": 2.0}}), QWEN, QWEN3, GPT2],
    ids=lambda spec: spec.model_type,
)
def test_no_value_in_a_config_does_worse_than_a_load_error(tmp_path: Path, spec: TinySpec) -> None:
    write_model(tmp_path, spec)
    config = config_of(spec)
    for key in (*config, "head_dim", "quantization_config", "layer_types", "use_sliding_window", "rope_parameters"):
        for odd in ODD:
            write_json(tmp_path / "config.json", config | {key: odd})
            try:
                open_checkpoint(tmp_path).close()
            except LoadError as e:
                assert str(tmp_path) in str(e)


def test_eos_is_the_union_of_all_sources(tmp_path: Path) -> None:
    write_model(tmp_path, TinySpec(extra={"eos_token_id": 1}))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 5]})
    assert open_checkpoint(tmp_path).config.eos_token_ids == (1, 5, 256)
    decoder = {"9": {"content": "<|endoftext|>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", settings | {"added_tokens_decoder": decoder})
    assert open_checkpoint(tmp_path).config.eos_token_ids == (1, 5, 9)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": None})
    assert open_checkpoint(tmp_path).config.eos_token_ids == (1, 9)


@pytest.mark.parametrize("eos", [None, [], 256])
def test_a_config_may_name_no_eos(tmp_path: Path, eos: Any) -> None:
    write_model(tmp_path, TinySpec(extra={"eos_token_id": eos}))
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_checkpoint(tmp_path).config.eos_token_ids == ((256,) if eos == 256 else ())


def test_an_id_with_thousands_of_digits_is_no_id(tmp_path: Path) -> None:
    write_model(tmp_path, TinySpec(extra={"eos_token_id": 1}))
    decoder = {"9" * 5000: {"content": "<|endoftext|>"}}
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>", "added_tokens_decoder": decoder})
    assert open_checkpoint(tmp_path).config.eos_token_ids == (1, 256)


def test_the_revision_follows_the_content(tmp_path: Path) -> None:
    names = ("one", "same", "other")
    for name in names:
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, LLAMA)
    path = tmp_path / "other" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    one, same, other = (open_checkpoint(tmp_path / name).revision for name in names)
    assert one == same != other
    assert len(one) == 32


def test_closing_lets_go_of_the_tensors(tmp_path: Path) -> None:
    write_model(tmp_path, LLAMA)
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(LoadError):
        checkpoint.get("embed")
