"""What is read of a mixture of experts, and which files are refused, by tensor or field and with what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import Q8_0
from tiny_experts import INNER, NUM_CHOSEN, NUM_EXPERTS, SHARED, Kind, expert_config, expert_gguf, expert_weights
from tiny_experts import write_experts as write

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.core.fields import Fields
from naru_worker.core.hf_config import parse_hf_config
from naru_worker.core.model_config import ExpertsConfig, ModelConfig
from naru_worker.core.weight_layout import expected_shapes

KINDS: tuple[Kind, ...] = ("mixtral", "qwen2_moe", "qwen3_moe")


def parse(kind: Kind, **extra: Any) -> ModelConfig:
    return parse_hf_config(Fields("config.json", expert_config(kind, **extra)))


def written(folder: Path, kind: Kind, **extra: Any) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(expert_gguf(kind, **extra))
    return path


def test_each_architecture_has_its_experts() -> None:
    mixtral, qwen2, qwen3 = (parse(kind) for kind in KINDS)
    sizes = (NUM_EXPERTS, NUM_CHOSEN, INNER)
    assert mixtral.experts == ExpertsConfig(*sizes, renormalizes=True, layers=(0, 1))
    assert qwen2.experts == ExpertsConfig(*sizes, renormalizes=False, layers=(0, 1), shared_size=SHARED)
    assert qwen3.experts == ExpertsConfig(*sizes, renormalizes=True, layers=(0, 1))
    assert [config.qk_norm for config in (mixtral, qwen2, qwen3)] == [False, False, True]
    assert [config.qkv_bias for config in (mixtral, qwen2, qwen3)] == [False, True, False]


def test_which_layers_have_experts_follows_the_config() -> None:
    assert parse("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[3, 9]).experts_of(3) is None
    experts = parse("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2).experts
    assert experts is not None and experts.layers == (1, 5)
    assert parse("qwen3_moe", mlp_only_layers=[0, 1]).experts is None
    assert parse("qwen3_moe", num_experts=0).experts is None


def test_defaults_are_the_reference_implementations() -> None:
    config = expert_config("mixtral")
    for name in ("num_local_experts", "num_experts_per_tok", "rope_theta", "num_key_value_heads"):
        del config[name]
    parsed = parse_hf_config(Fields("config.json", config | {"num_attention_heads": 8}))
    assert parsed.experts is not None and (parsed.experts.num_experts, parsed.experts.num_chosen) == (8, 2)
    assert parsed.num_kv_heads == 8 and parsed.rope is not None and parsed.rope.theta == 1e6
    config = expert_config("qwen3_moe", num_local_experts=6)
    del config["num_experts"], config["norm_topk_prob"]
    qwen = parse_hf_config(Fields("config.json", config)).experts
    assert qwen is not None and qwen.num_experts == 6 and not qwen.renormalizes


@pytest.mark.parametrize(
    ("kind", "extra", "field"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("mixtral", {"num_local_experts": 2**20}, "num_local_experts"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts"),
        ("mixtral", {"num_local_experts": 1024, "num_hidden_layers": 128}, "experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
    ],
)
def test_a_config_that_fits_no_model_names_its_field(kind: Kind, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse(kind, **extra)
    assert caught.value.param == field


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_in_a_config_does_worse_than_a_load_error(kind: Kind) -> None:
    odd: tuple[Any, ...] = (
        True,
        -1,
        0,
        1,
        7,
        2**31,
        2**70,
        1e308,
        -0.5,
        "",
        "x",
        [],
        ["a"],
        [-1],
        [True],
        {},
        {"a": []},
        [[1]],
    )
    more = ("mlp_only_layers", "decoder_sparse_step", "num_local_experts", "norm_topk_prob", "use_sliding_window")
    refused = 0
    for key in {*expert_config(kind), *more}:
        for value in odd:
            try:
                expected_shapes(parse(kind, **{key: value}))
            except LoadError as error:
                refused += 1
                assert str(error).startswith("config.json: ")
    assert refused > 150


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_and_folder_of_one_model_hold_the_same_tensors(kind: Kind, tmp_path: Path) -> None:
    write(tmp_path, kind)
    folder, file = open_checkpoint(tmp_path), open_checkpoint(written(tmp_path, kind))
    assert folder.config.experts == file.config.experts
    assert not folder.ignored_tensors and not file.ignored_tensors
    for name, shape in expected_shapes(folder.config).items():
        ours, theirs = dequantize(folder.get(name)), dequantize(file.get(name))
        assert ours.shape == shape and np.array_equal(ours, theirs), name


def test_an_experts_part_of_a_files_tensor_is_a_view_whatever_its_format(tmp_path: Path) -> None:
    file = open_checkpoint(written(tmp_path, "mixtral", types={"ffn_up_exps.weight": Q8_0}))
    last = file.get(f"layers.1.experts.{NUM_EXPERTS - 1}.up")
    assert (last.format, last.shape, last.data.nbytes) == ("q8_0", (INNER, 64), INNER * 2 * 34)
    expected = expert_weights("mixtral")[f"model.layers.1.block_sparse_moe.experts.{NUM_EXPERTS - 1}.w3.weight"]
    assert np.abs(dequantize(last) - expected).max() < 0.02 * np.abs(expected).max()


def test_what_gguf_leaves_out_is_what_its_writers_mean(tmp_path: Path) -> None:
    changed = open_checkpoint(
        written(tmp_path, "qwen3_moe", qwen3moe__expert_weights_norm=False, qwen3moe__feed_forward_length=None)
    ).config
    assert changed.experts is not None and not changed.experts.renormalizes
    assert changed.intermediate_size == INNER


@pytest.mark.parametrize(
    ("kind", "extra", "field"),
    [
        ("mixtral", {"llama__expert_used_count": 9}, "llama.expert_used_count"),
        ("mixtral", {"llama__expert_used_count": None}, "llama.expert_used_count"),
        ("mixtral", {"llama__expert_gating_func": 2}, "llama.expert_gating_func"),
        ("mixtral", {"llama__expert_weights_scale": 2.5}, "llama.expert_weights_scale"),
        ("mixtral", {"llama__expert_shared_count": 1}, "llama.expert_shared_count"),
        ("mixtral", {"llama__expert_count": 3}, "blk.0.ffn_gate_inp.weight"),
        ("qwen3_moe", {"qwen3moe__expert_count": 0}, "qwen3moe.expert_count"),
        ("qwen3_moe", {"qwen3moe__expert_feed_forward_length": None}, "qwen3moe.expert_feed_forward_length"),
        ("qwen3_moe", {"qwen3moe__expert_feed_forward_length": 48}, "blk.0.ffn_up_exps.weight"),
        (
            "qwen2_moe",
            {"qwen2moe__expert_shared_feed_forward_length": None},
            "qwen2moe.expert_shared_feed_forward_length",
        ),
        ("qwen3_moe", {"without": "blk.1.ffn_down_exps.weight"}, "blk.1.ffn_down_exps.weight"),
        ("qwen3_moe", {"without": "blk.0.attn_k_norm.weight"}, "blk.0.attn_k_norm.weight"),
        ("mixtral", {"types": {"ffn_gate_inp.weight": Q8_0}}, "blk.0.ffn_gate_inp.weight"),
    ],
)
def test_a_broken_gguf_file_names_what_is_wrong(kind: Kind, extra: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        open_checkpoint(written(tmp_path, kind, **extra))
    assert caught.value.param == field, caught.value


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
ROUTER = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (EXPERT, None, "experts.2.w2.weight' is missing"),
        (EXPERT, np.zeros((64, INNER + 1), np.float32), r"has shape \(64, 33\), but the config needs \(64, 32\)"),
        (EXPERT, np.zeros((64, INNER), np.int32), "is I32"),
        (ROUTER, np.zeros((NUM_EXPERTS + 1, 64), np.float32), r"has shape \(5, 64\), but the config needs \(4, 64\)"),
    ],
)
def test_a_folder_without_an_expert_or_with_a_wrong_one_is_refused(
    name: str, array: Any, message: str, tmp_path: Path
) -> None:
    weights = expert_weights("mixtral")
    if array is None:
        del weights[name]
    else:
        weights[name] = array
    write(tmp_path, "mixtral", weights=weights)
    with pytest.raises(LoadError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.param == name


def test_a_shared_gate_of_several_rows_is_refused(tmp_path: Path) -> None:
    weights = expert_weights("qwen2_moe")
    weights["model.layers.0.mlp.shared_expert_gate.weight"] = np.zeros((2, 64), np.float32)
    write(tmp_path, "qwen2_moe", weights=weights)
    with pytest.raises(LoadError, match=r"has shape \(2, 64\), but the config needs \(1, 64\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_backend_says_that_it_cannot_and_who_can(kind: Kind, tmp_path: Path) -> None:
    from naru_worker.adapters.images.weight_plan import plan_weights
    from naru_worker.adapters.ops import cpu
    from naru_worker.adapters.ops.protocol import RunnerOptions

    write(tmp_path, kind)
    checkpoint = open_checkpoint(tmp_path)
    options = RunnerOptions(block_size=16, num_blocks=8, max_num_tokens=64, max_num_seqs=4, max_model_len=128)
    for ask in (
        lambda: cpu.weight_bytes(checkpoint),
        lambda: cpu.workspace_bytes(checkpoint.config, options),
        lambda: cpu.load_runner(checkpoint, options),
        lambda: plan_weights(checkpoint, lambda _number, rows, columns: rows * columns),
    ):
        with pytest.raises(LoadError, match=r"a mixture of experts, which the cpu backend cannot serve; .* cuda"):
            ask()
