"""Folders of other quantizers: their matrices come out in blocks along the columns, or are refused at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float_codes import FLOATS
from quantized_models import (
    SCHEMES,
    SPEC,
    Scheme,
    Stored,
    awq,
    compressed,
    floats,
    gptq,
    packed,
    quantized,
    write_quantized,
    write_stored,
)
from tiny_models import TinySpec, config_of, weights_of, write_json, write_model

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_transcode import native_tensor
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint
from naru_worker.adapters.weights.describing import describe
from naru_worker.adapters.weights.lazy_tensor import LazyTensor, rows_of
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.adapters.weights.tensor_format import tensor_bytes

MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
DOWN = "model.layers.0.mlp.down_proj"
FORMATS = {
    "gptq, groups of 128": "q4_s128",
    "gptq, groups of 64 with zeros": "q4_g64",
    "gptq, groups of 32 with zeros": "q4_1",
    "gptq, whole rows": "q4_s128",
    "awq, groups of 64": "q4_g64",
    "awq, groups of 128": "q4_g128",
    "packed, groups of 32": "q4_0",
    "packed, whole rows with zeros": "q4_g128",
    "floats, one scale": "e4m3_row",
    "floats, scales of rows": "e4m3_row",
    "floats, scales of blocks": "e4m3_b128",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_every_matrix_is_what_its_quantizer_meant(tmp_path: Path, name: str) -> None:
    meant = write_quantized(tmp_path, SCHEMES[name])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.ignored_tensors == ()
    for own, module in MODULES.items():
        tensor = checkpoint.get(f"layers.0.{own}")
        expected = meant[f"model.layers.0.{module}.weight"]
        assert (tensor.name, tensor.format, tensor.shape) == (f"layers.0.{own}", FORMATS[name], expected.shape)
        # Minimums are rounded to 16 bits.
        assert np.abs(dequantize(tensor) - expected).max() <= 2.0**-10 * np.abs(expected).max()
        assert tensor.num_bytes == tensor.data.nbytes == tensor_bytes(tensor.format, tensor.shape)
        # Rows are made from anywhere, in the middle of a word or block, too.
        np.testing.assert_array_equal(rows_of(tensor, 3, 61), rows_of(tensor, 0, tensor.shape[0])[3:61])
    np.testing.assert_array_equal(dequantize(checkpoint.get("lm_head")), meant["lm_head.weight"])
    assert describe(tmp_path)["weights"] == ("fp8" if name.startswith("floats") else "int4")


@pytest.mark.parametrize("name", SCHEMES)
def test_for_native_code_4_bits_stay_what_they_are_and_8_bits_lose_a_fifth_of_what_they_lost(
    tmp_path: Path, name: str
) -> None:
    meant = write_quantized(tmp_path, SCHEMES[name])[f"{DOWN}.weight"]
    tensor = open_checkpoint(tmp_path).get("layers.0.down")
    changed = native_tensor(tensor)
    assert changed.format in ("q4_0", "q4_1", "q8_0") and changed.num_bytes == changed.data.nbytes
    if name.startswith("floats"):
        before = np.square(meant - weights_of(SPEC)[f"{DOWN}.weight"]).mean()
        assert np.square(dequantize(changed) - meant).mean() < before / 4.5**2
    else:
        np.testing.assert_array_equal(dequantize(changed), dequantize(tensor))


def test_numbers_too_small_for_16_bits_are_zeros_to_native_code_and_too_large_ones_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized(weights_of(SPEC), floats("tensor"))
    for scale, message in ((1e-12, None), (1e30, "'layers.0.down' has scales that 16 bits cannot hold")):
        stored[f"{DOWN}.weight_scale"] = ("F32", np.array(scale, np.float32))
        changed = native_tensor(_opened(tmp_path, floats("tensor"), stored).get("layers.0.down"))
        if message is None:
            assert not dequantize(changed).any()
        else:
            with pytest.raises(LoadError, match=message):
                _ = changed.data


def test_whoever_counts_bytes_makes_none(tmp_path: Path) -> None:
    write_quantized(tmp_path, SCHEMES["awq, groups of 64"], TinySpec(hidden_size=256, intermediate_size=512))
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    tensors = [checkpoint.get(f"layers.0.{name}") for name in MODULES]
    assert sum(native_tensor(tensor).num_bytes for tensor in tensors) > 2**18
    assert tracemalloc.get_traced_memory()[1] < 2**16
    tracemalloc.stop()


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_have_parts_that_make_up_the_whole(tmp_path: Path, name: str) -> None:
    spec = TinySpec(hidden_size=256, intermediate_size=512, num_layers=1, num_kv_heads=2, max_positions=128)
    write_quantized(
        tmp_path, SCHEMES[name], spec, ("_proj", "lm_head") if name == "floats, scales of blocks" else ("_proj",)
    )
    whole = open_checkpoint(tmp_path)
    ranks = [ShardedCheckpoint(open_checkpoint(tmp_path), rank, 2) for rank in range(2)]
    for own in (*(f"layers.0.{part}" for part in MODULES), "lm_head"):
        parts = [dequantize(rank.get(own)) for rank in ranks]
        joined = np.concatenate(parts, axis=1 if own.endswith((".o", ".down")) else 0)
        np.testing.assert_array_equal(joined, dequantize(whole.get(own)))
        assert isinstance(ranks[1].get(own), LazyTensor) == isinstance(whole.get(own), LazyTensor)


def test_a_zero_of_0_in_the_first_version_of_gptq_borrows_from_its_neighbour(tmp_path: Path) -> None:
    weights = weights_of(SPEC)
    weights[f"{DOWN}.weight"] = np.abs(weights[f"{DOWN}.weight"])
    weights[f"{DOWN}.weight"][1::3] *= -1
    scheme = gptq(64, symmetric=False)
    stored, meant = quantized(weights, scheme)
    values = dequantize(_opened(tmp_path, scheme, stored).get("layers.0.down"))
    assert np.abs(values - meant[f"{DOWN}.weight"]).max() < 1e-3


def test_modules_that_the_config_calls_plain_are_plain(tmp_path: Path) -> None:
    """Whatever the lists say of others: what the tensors are decides."""
    for scheme, key in ((awq(64), "modules_to_not_convert"), (floats("tensor"), "ignored_layers")):
        listed = Scheme(scheme.config | {key: [DOWN, "re:.*", "lm_head"]}, scheme.module)
        stored, meant = quantized(weights_of(SPEC), scheme, ("gate_proj", "up_proj"))
        checkpoint = _opened(tmp_path, listed, stored)
        np.testing.assert_array_equal(dequantize(checkpoint.get("layers.0.down")), meant[f"{DOWN}.weight"])
        assert checkpoint.get("layers.0.up").format.startswith(("q4", "e4m3"))
        with pytest.raises(LoadError, match=r"down_proj.weight' is (missing|F8_E4M3; it must be F32, F16 or BF16)"):
            _opened(tmp_path, listed, quantized(weights_of(SPEC), scheme)[0])


def test_scales_of_a_cache_and_of_activations_are_no_weights(tmp_path: Path) -> None:
    stored, _ = quantized(weights_of(SPEC), floats("tensor"))
    for name in (f"{DOWN}.input_scale", "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"):
        stored[name] = ("F32", np.ones(1, np.float32))
    assert _opened(tmp_path, floats("tensor"), stored).ignored_tensors == ()


def _without(part: str) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        del stored[f"{DOWN}.{part}"]

    return change


def _with(part: str, dtype: str, elements: Any) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        stored[f"{DOWN}.{part}"] = (dtype, elements)

    return change


GPTQ, AWQ, PACKED = gptq(128, symmetric=True), awq(64), packed(32, symmetric=True)
BAD: dict[str, tuple[Scheme, Callable[[Stored], None], str]] = {
    "no zeros": (GPTQ, _without("qzeros"), "down_proj.qzeros' is missing beside 'qweight'"),
    "no scales": (AWQ, _without("scales"), "down_proj.scales' is missing"),
    "words of another type": (
        GPTQ, _with("qweight", "F32", np.zeros((32, 128), np.float32)), "qweight' is F32; it must be I32",
    ),
    "too few words": (
        AWQ, _with("qweight", "I32", np.zeros((256, 8), np.int32)),
        r"qweight' has shape \(256, 8\), but the config needs \(256, 16\)",
    ),
    "groups of another size": (
        GPTQ, _with("scales", "F16", np.ones((4, 128), np.float16)), r"has shape \(4, 128\), but .* \(2, 128\)",
    ),
    "columns reordered": (
        GPTQ, _with("g_idx", "I32", (np.arange(256)[::-1] // 128).astype(np.int32)), r"g_idx' reorders .* \(desc_act\)",
    ),
    "packed columns reordered": (PACKED, _with("weight_g_idx", "I32", np.zeros(256, np.int32)), "weight_g_idx' reord"),
    "scales of integers": (PACKED, _with("weight_scale", "I32", np.ones((128, 8), np.int32)), "must be F32 or F16 or"),
    "floats without a scale": (floats("tensor"), _without("weight_scale"), "weight_scale' is missing beside 'weight'"),
    "floats of another kind": (
        floats("tensor"), _with("weight", "F8_E5M2", np.zeros((128, 256), np.uint8)), "is F8_E5M2; it must be F8_E4M3",
    ),
    "scales of other blocks": (
        floats("block"), _with("weight_scale_inv", "F32", np.ones((2, 2), np.float32)), r"has shape \(2, 2\), but the",
    ),
    "two scales for all": (
        floats("tensor"), _with("weight_scale", "F32", np.ones(2, np.float32)), r"has shape \(2,\), but the config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_folder_whose_tensors_do_not_fit_is_refused_when_it_is_opened(tmp_path: Path, name: str) -> None:
    scheme, change, message = BAD[name]
    stored, _ = quantized(weights_of(SPEC), scheme)
    change(stored)
    with pytest.raises(LoadError, match=message) as caught:
        _opened(tmp_path, scheme, stored)
    assert str(tmp_path) in str(caught.value) and DOWN in str(caught.value.param)


@pytest.mark.parametrize(
    ("spec", "scheme", "message"),
    [
        (TinySpec(hidden_size=96), GPTQ, "96 columns in groups of 128; whole groups of a multiple of 32 columns"),
        (TinySpec(hidden_size=48, num_heads=3, num_kv_heads=1), floats("tensor"), "has 48 columns of 8-bit floats"),
        (TinySpec(num_heads=3, num_kv_heads=1, head_dim=4), gptq(32, symmetric=True), "of 12 rows and 64 columns"),
    ],
)  # fmt: skip
def test_sizes_that_blocks_do_not_fit_are_refused(tmp_path: Path, spec: TinySpec, scheme: Scheme, message: str) -> None:
    write_model(tmp_path, spec)
    stored: Stored = {}
    for name, values in weights_of(spec).items():
        part = "weight" if scheme.config["quant_method"] == "fp8" else "qweight"
        is_linear = name.endswith("_proj.weight")
        stored[name.replace("weight", part) if is_linear else name] = (
            ("F8_E4M3", np.zeros(values.shape, np.uint8)) if is_linear else ("F32", values)
        )
    with pytest.raises(LoadError, match=message):
        _opened(tmp_path, scheme, stored, spec)


def test_numbers_that_cannot_be_used_are_refused_when_they_are_read(tmp_path: Path) -> None:
    stored, _ = quantized(weights_of(SPEC), GPTQ)
    wrong = Scheme(GPTQ.config | {"checkpoint_format": "gptq_v2"}, GPTQ.module)
    with pytest.raises(LoadError, match="said to be symmetric, but 8 does not stand for 0"):
        _ = _opened(tmp_path, wrong, stored).get("layers.0.down").data
    stored[f"{DOWN}.scales"] = ("F32", np.full((2, 128), 1e9, np.float32))
    with pytest.raises(LoadError, match=r"down_proj.weight' has scales that 16 bits cannot hold"):
        _ = _opened(tmp_path, GPTQ, stored).get("layers.0.down").data
    for part, elements in (("weight", np.full((128, 256), 127, np.uint8)), ("weight_scale", np.array(np.inf, "<f4"))):
        stored, _ = quantized(weights_of(SPEC), floats("tensor"))
        stored[f"{DOWN}.{part}"] = (stored[f"{DOWN}.{part}"][0], elements)
        with pytest.raises(LoadError, match="has values or scales that are not numbers"):
            _ = _opened(tmp_path, floats("tensor"), stored).get("layers.0.down").data


def test_gpt2_and_tables_of_8_bit_floats_are_refused(tmp_path: Path) -> None:
    spec = TinySpec(model_type="gpt2", num_kv_heads=4)
    write_model(tmp_path, spec)
    write_json(tmp_path / "config.json", config_of(spec) | {"quantization_config": GPTQ.config})
    with pytest.raises(LoadError, match="quantization_config is set; GPT-2 models are served from plain"):
        open_checkpoint(tmp_path)
    scheme = floats("tensor")
    stored, _ = quantized(weights_of(SPEC), scheme, ("_proj", "embed_tokens"))
    with pytest.raises(LoadError, match=r"embed_tokens.weight' is F8_E4M3; it must be F32, F16 or BF16"):
        _opened(tmp_path, scheme, stored)


def test_scales_of_any_blocks_of_whole_32_columns_are_kept(tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [48, 96]}
    scheme = Scheme(compressed("float-quantized", weights), floats("tensor").module)
    stored, _ = quantized(weights_of(SPEC), scheme)
    rng = np.random.default_rng(0)
    expected = {}
    for name in [name for name in stored if name.endswith("_scale")]:
        codes = stored[name.replace("_scale", "")][1]
        scales = rng.uniform(0.01, 1, (-(-codes.shape[0] // 48), -(-codes.shape[1] // 96))).astype(np.float32)
        stored[name] = ("F32", scales)
        wide = np.repeat(np.repeat(scales, 48, 0), 96, 1)[: codes.shape[0], : codes.shape[1]]
        expected[name.removesuffix("_scale")] = FLOATS[codes] * wide
    tensor = _opened(tmp_path, scheme, stored).get("layers.0.down")
    assert tensor.format == "e4m3_b32"
    np.testing.assert_allclose(dequantize(tensor), expected[f"{DOWN}.weight"], rtol=1e-6)


def _opened(folder: Path, scheme: Scheme, stored: Stored, spec: TinySpec = SPEC) -> Any:
    write_model(folder, spec)
    write_stored(folder / "model.safetensors", stored)
    write_json(folder / "config.json", config_of(spec) | {"quantization_config": scheme.config})
    return open_checkpoint(folder)
