"""config.json is read as the reference reads it, or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_models import TinySpec, config_of

from naru_proto.errors import LoadError
from naru_worker.core.fields import Fields
from naru_worker.core.hf_config import parse_hf_config
from naru_worker.core.model_config import ModelConfig, RopeConfig
from naru_worker.core.rope import inverse_frequencies


def parse(spec: TinySpec, **extra: Any) -> ModelConfig:
    return parse_hf_config(Fields("config.json", config_of(spec) | extra))


def parse_without(spec: TinySpec, absent: str) -> ModelConfig:
    return parse_hf_config(Fields("config.json", {k: v for k, v in config_of(spec).items() if k != absent}))


def rope(**extra: Any) -> RopeConfig:
    parsed = parse(TinySpec(), **extra).rope
    assert parsed is not None
    return parsed


LLAMA = TinySpec()
PLAIN = RopeConfig(theta=10000.0, rotary_dim=16)


def test_the_spellings_of_a_scaling_kind_are_alike() -> None:
    expected = RopeConfig(theta=10000.0, rotary_dim=16, kind="linear", factor=2.0)
    assert rope(rope_scaling={"type": "linear", "factor": 2}) == expected
    assert rope(rope_scaling={"rope_type": "linear", "factor": 2.0}) == expected
    assert rope(rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2.0}) == expected
    assert rope(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}) == expected


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_is_plain(scaling: Any) -> None:
    assert rope(rope_scaling=scaling) == PLAIN
    assert rope(rope_parameters=scaling) == PLAIN


def test_theta_inside_rope_parameters_wins_and_llama3_is_read() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert rope(rope_parameters=parameters) == RopeConfig(
        theta=500000.0, rotary_dim=16, kind="llama3", factor=8.0, original_max_position_embeddings=8192
    )


@pytest.mark.parametrize("kind", ["mystery", "dynamic", "longrope", ""])
def test_an_unknown_scaling_kind_is_never_dropped(kind: str) -> None:
    with pytest.raises(LoadError, match=r"config.json: rope_scaling.rope_type is '.*'; supported are default, linear"):
        rope(rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "linear", "factor": 1e300}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_type": 3}, "rope_type"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": math.inf}, "beta_fast"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5, "rope_type": "default"}, "partial_rotary_factor"),
        ([1], "rope_scaling"),
    ],
)
def test_a_wrong_scaling_names_its_field(scaling: Any, field: str) -> None:
    with pytest.raises(LoadError, match=field):
        rope(rope_scaling=scaling)


def yarn(max_positions: int, **more: Any) -> ModelConfig:
    scaling = {"rope_type": "yarn", "factor": 4.0, **more}
    return parse(LLAMA, max_position_embeddings=max_positions, rope_scaling=scaling)


def test_yarn_length_is_multiplied_once() -> None:
    assert yarn(512, original_max_position_embeddings=128).max_position_embeddings == 512
    assert yarn(128, original_max_position_embeddings=128).max_position_embeddings == 512
    assert yarn(128).max_position_embeddings == 512


def test_other_kinds_keep_the_length() -> None:
    for scaling in ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"}):
        assert parse(LLAMA, rope_scaling=scaling).max_position_embeddings == 256


def test_yarn_attention_factor_is_the_given_or_the_papers() -> None:
    plain, given = yarn(128).rope, yarn(128, attention_factor=1.5).rope
    assert plain is not None and given is not None
    assert plain.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert given.attention_factor == 1.5


def test_frequencies_of_llama3_keep_short_waves_and_stretch_long_ones() -> None:
    config = RopeConfig(theta=10000.0, rotary_dim=64, kind="llama3", factor=8.0, original_max_position_embeddings=128)
    plain = inverse_frequencies(RopeConfig(theta=10000.0, rotary_dim=64))
    scaled = inverse_frequencies(config)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8.0)
    assert all(p / 8.0 <= s <= p for p, s in zip(plain, scaled, strict=True))


def test_head_dim_is_the_given_or_the_quotient() -> None:
    odd = TinySpec(hidden_size=56, num_heads=6, num_kv_heads=2, head_dim=16)
    assert parse(odd).head_dim == 16
    assert parse(odd).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2
    assert parse(LLAMA, head_dim=None).head_dim == 16
    with pytest.raises(LoadError, match="hidden_size"):
        parse(TinySpec(hidden_size=56, num_heads=6, num_kv_heads=2))


def test_no_num_key_value_heads_means_one_a_head() -> None:
    assert parse_without(LLAMA, "num_key_value_heads").num_kv_heads == 4
    assert parse(LLAMA, num_key_value_heads=None).num_kv_heads == 4


def test_qwen3_has_norms_of_heads_and_its_references_defaults() -> None:
    spec = TinySpec("qwen3", hidden_size=256, num_heads=64, num_kv_heads=8)
    parsed = parse(spec, head_dim=32)
    assert (parsed.architecture, parsed.qk_norm, parsed.head_dim) == ("qwen3", True, 32)
    assert (parsed.qkv_bias, parsed.o_bias, parsed.mlp_bias, parsed.tie_word_embeddings) == (False,) * 4
    biased = parse(spec, attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, False)
    assert parse_without(spec, "head_dim").head_dim == 128
    assert parse_without(spec, "num_key_value_heads").num_kv_heads == 32
    assert parse(spec, num_key_value_heads=None).num_kv_heads == 64


def test_windows_follow_the_architectures_rules() -> None:
    window = {"sliding_window": 32}
    assert parse(TinySpec("mistral"), **window).sliding_windows == (32, 32)
    assert parse(TinySpec("mistral"), sliding_window=None).sliding_windows == ()
    assert parse_without(TinySpec("mistral"), "sliding_window").sliding_windows == (4096, 4096)
    for model_type in ("qwen2", "qwen3"):
        assert_windows_of_qwen(TinySpec(model_type, num_layers=3), window)


def assert_windows_of_qwen(qwen: TinySpec, window: dict[str, Any]) -> None:
    assert parse(qwen, use_sliding_window=False, **window).sliding_windows == ()
    assert parse(qwen, **window).sliding_windows == ()
    assert parse(qwen, use_sliding_window=True, sliding_window=None).sliding_windows == ()
    assert parse(qwen, use_sliding_window=True, max_window_layers=1, **window).sliding_windows == (None, 32, 32)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert parse(qwen, use_sliding_window=True, layer_types=kinds, **window).sliding_windows == (32, None, None)


@pytest.mark.parametrize("layer_types", [["chunked_attention"] * 2, ["full_attention"], "full_attention", [1, 2]])
def test_an_unsupported_window_layout_is_refused(layer_types: Any) -> None:
    with pytest.raises(LoadError, match="layer_types"):
        parse(TinySpec("mistral"), sliding_window=32, layer_types=layer_types)


@pytest.mark.parametrize(
    ("spec", "extra", "field"),
    [
        (LLAMA, {"model_type": "mamba"}, "model_type"),
        (LLAMA, {"model_type": None}, "model_type"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA, {"hidden_size": 2**40}, "hidden_size"),
        (LLAMA, {"hidden_size": -64}, "hidden_size"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size"),
        (LLAMA, {"hidden_size": 64.5}, "hidden_size"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA, {"vocab_size": 10**12}, "vocab_size"),
        (LLAMA, {"vocab_size": None}, "vocab_size"),
        (LLAMA, {"max_position_embeddings": 10**12}, "max_position_embeddings"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps"),
        (LLAMA, {"head_dim": 15}, "head_dim"),
        (LLAMA, {"head_dim": 10**6}, "head_dim"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA, {"eos_token_id": -1}, "eos_token_id"),
        (LLAMA, {"eos_token_id": ["x"]}, "eos_token_id"),
        (TinySpec("gpt2"), {"n_head": 3}, "n_embd"),
        (TinySpec("gpt2"), {"activation_function": "relu"}, "activation_function"),
        (TinySpec("gpt2"), {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (TinySpec("gpt2"), {"scale_attn_weights": False}, "scale_attn_weights"),
        (TinySpec("gpt2"), {"n_positions": 0}, "n_positions"),
    ],
)
def test_a_hostile_or_unknown_value_names_file_and_field(spec: TinySpec, extra: dict[str, Any], field: str) -> None:
    with pytest.raises(LoadError, match=f"config.json: {field}") as caught:
        parse(spec, **extra)
    assert caught.value.param == field


def test_gpt2_defaults_fill_what_is_absent() -> None:
    config = parse_without(TinySpec("gpt2", extra={"n_inner": None}), "tie_word_embeddings")
    assert (config.intermediate_size, config.tie_word_embeddings, config.rope) == (256, True, None)
