"""Footprints: published parameter counts, a real file's bytes, and the arithmetic's borders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto import shapes
from naru_proto.errors import InvalidRequest
from naru_proto.shapes import WEIGHT_FORMATS, ModelShape
from naru_worker.adapters.ops.cpu_sizes import kv_block_bytes
from naru_worker.adapters.ops.protocol import KVFormat, RunnerOptions
from naru_worker.adapters.weights.gguf_file import GgufFile
from naru_worker.core.model_config import ModelConfig

SMOLLM2_135M = ModelShape(30, 576, 1536, 9, 3, 64, 49152, is_head_tied=True)
LLAMA3_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
QWEN25_05B = ModelShape(24, 896, 4864, 14, 2, 64, 151936, is_head_tied=True, has_qkv_bias=True)
GPT2 = ModelShape(
    12,
    768,
    3072,
    12,
    12,
    64,
    50257,
    mlp="plain",
    norm="layer",
    is_head_tied=True,
    has_qkv_bias=True,
    has_o_bias=True,
    has_mlp_bias=True,
    num_learned_positions=1024,
)


@pytest.mark.parametrize(
    ("shape", "published"),
    [(SMOLLM2_135M, 134_515_008), (LLAMA3_8B, 8_030_261_248), (QWEN25_05B, 494_032_768), (GPT2, 124_439_808)],
    ids=["smollm2-135m", "llama3-8b", "qwen2.5-0.5b", "gpt2"],
)
def test_parameters_are_the_published_number(shape: ModelShape, published: int) -> None:
    assert shapes.num_parameters(shape) == published


@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA3_8B, QWEN25_05B, GPT2])
def test_plain_float32_takes_four_bytes_a_parameter(shape: ModelShape) -> None:
    assert shapes.weight_bytes(shape, WEIGHT_FORMATS["f32"]) == 4 * shapes.num_parameters(shape)


def test_bytes_are_those_of_the_real_file(smollm2_path: Path) -> None:
    file = GgufFile(smollm2_path)
    in_file = sum(len(tensor.data) for tensor in file.tensors.values())
    file.tensors.clear()  # views of the map
    file.close()
    assert shapes.weight_bytes(SMOLLM2_135M, WEIGHT_FORMATS["q4_1"], WEIGHT_FORMATS["q8_0"]) == in_file


def test_kv_bytes_of_a_token_are_two_per_layer_head_and_element() -> None:
    assert shapes.kv_bytes_per_token(SMOLLM2_135M) == 2 * 30 * 3 * 64 * 2 == 23_040
    assert shapes.kv_bytes_per_token(LLAMA3_8B) == 131_072
    assert shapes.kv_bytes_per_token(SMOLLM2_135M, "float32") == 2 * 23_040


def test_kv_bytes_of_a_token_in_int8_are_bytes_and_two_scales_a_head() -> None:
    assert shapes.kv_bytes_per_token(SMOLLM2_135M, "int8") == 30 * 3 * 2 * (64 + 4) == 12_240
    assert shapes.kv_bytes_per_token(dataclasses.replace(SMOLLM2_135M, head_dim=40), "int8") == 30 * 3 * 2 * (48 + 4)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 128, 256])
@pytest.mark.parametrize(("dtype", "kv_format"), [("float32", "f32"), ("float16", "f16"), ("int8", "int8")])
def test_what_is_promised_of_the_kv_cache_is_what_the_cpu_engine_books(
    head_dim: int, dtype: shapes.KVDtype, kv_format: KVFormat
) -> None:
    shape = ModelShape(3, 6 * head_dim, 64, 6, 2, head_dim, 99)
    counts: dict[str, Any] = dict(architecture="llama", vocab_size=99, hidden_size=6 * head_dim, intermediate_size=64)
    heads: dict[str, Any] = dict(num_layers=3, num_heads=6, num_kv_heads=2, head_dim=head_dim)
    kinds: dict[str, Any] = dict(norm="rms", norm_eps=1e-5, activation="silu", rope=None, tie_word_embeddings=True)
    config = ModelConfig(**counts, **heads, **kinds, max_position_embeddings=64)
    options = RunnerOptions(
        block_size=16,
        num_blocks=4,
        max_num_tokens=16,
        max_num_seqs=1,
        max_model_len=32,
        num_threads=1,
        kv_format=kv_format,
    )
    assert shapes.kv_bytes(shape, 17, 16, dtype) == 2 * kv_block_bytes(config, options)
    assert shapes.max_kv_tokens(shape, kv_block_bytes(config, options), 16, dtype) == 16


def test_a_begun_block_counts_whole() -> None:
    assert shapes.kv_bytes(SMOLLM2_135M, 0, 16) == 0
    assert shapes.kv_bytes(SMOLLM2_135M, 1, 16) == shapes.kv_bytes(SMOLLM2_135M, 16, 16) == 16 * 23_040
    assert shapes.kv_bytes(SMOLLM2_135M, 17, 16) == 32 * 23_040


@given(st.integers(0, 10**9), st.sampled_from([1, 16, 32, 64]))
def test_what_is_promised_fits_and_one_block_more_does_not(num_bytes: int, block_size: int) -> None:
    num_tokens = shapes.max_kv_tokens(SMOLLM2_135M, num_bytes, block_size)
    assert shapes.kv_bytes(SMOLLM2_135M, num_tokens, block_size) <= num_bytes
    assert shapes.kv_bytes(SMOLLM2_135M, num_tokens + 1, block_size) > num_bytes


def test_a_footprint_is_the_sum_of_its_parts() -> None:
    result = shapes.footprint(
        SMOLLM2_135M,
        WEIGHT_FORMATS["q4_1"],
        WEIGHT_FORMATS["q8_0"],
        num_kv_tokens=100,
        block_size=16,
        workspace_bytes=7,
    )
    assert result.kv_bytes == 112 * 23_040
    assert result.total_bytes == result.weight_bytes + result.kv_bytes + 7


def test_rows_are_padded_to_whole_blocks() -> None:
    assert WEIGHT_FORMATS["q4_1"].matrix_bytes(2, 33) == 2 * 2 * 20
    assert WEIGHT_FORMATS["q4_1"].bits_per_weight == 5.0


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"num_layers": 0}, "num_layers"), ({"num_heads": 8}, "num_kv_heads"), ({"vocab_size": -1}, "vocab_size")],
)
def test_impossible_shapes_are_refused_by_name(changes: dict[str, int], param: str) -> None:
    good = ModelShape(1, 64, 128, 9, 3, 64, 100)
    with pytest.raises(InvalidRequest) as caught:
        dataclasses.replace(good, **changes)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'q5_0'.*q4_1"):
        shapes.weight_format("q5_0")
