"""What config.json says of quantization is understood, or refused with the field, the value and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from naru_proto.errors import LoadError
from naru_worker.core.fields import Fields
from naru_worker.core.quantization import Quantization, parse_quantization

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
PACKED = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def compressed(layout: str, *weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups} | more


def parse(config: Any) -> Quantization | None:
    return parse_quantization(Fields("config.json", {"quantization_config": config}))


def test_a_config_without_it_has_plain_weights() -> None:
    assert parse_quantization(Fields("config.json", {})) is None
    assert parse(None) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, Quantization("gptq", 128, stores_zero_minus_one=True)),
        ({"quant_method": "gptq"}, Quantization("gptq", 128, stores_zero_minus_one=True)),
        (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, Quantization("gptq", 128, is_symmetric=False)),
        (GPTQ | {"group_size": -1}, Quantization("gptq", -1, stores_zero_minus_one=True)),
        (
            AWQ | {"modules_to_not_convert": ["lm_head"]},
            Quantization("awq", 64, is_symmetric=False, plain_modules=frozenset(["lm_head"])),
        ),
        (BLOCKS, Quantization("fp8", block=(128, 128))),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["a"]},
            Quantization("fp8", plain_modules=frozenset(["a"])),
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Quantization("fp8")),
        (compressed("float-quantized", FLOATS, FLOATS), Quantization("fp8")),
        (
            compressed("naive-quantized", FLOATS | {"strategy": "block", "block_structure": [64, 32]}),
            Quantization("fp8", block=(64, 32)),
        ),
        (
            compressed("float-quantized", FLOATS | {"strategy": "group", "group_size": 64}),
            Quantization("fp8", block=(1, 64)),
        ),
        (
            compressed("pack-quantized", PACKED, ignore=["lm_head", "re:.*gate"], sparsity_config={"format": "dense"}),
            Quantization(
                "packed", 32, is_symmetric=False, plain_modules=frozenset(["lm_head", "re:.*gate"]),
            ),
        ),
        (compressed("pack-quantized", PACKED | {"strategy": "channel"}), Quantization("packed", is_symmetric=False)),
    ],
)  # fmt: skip
def test_what_is_supported(config: dict[str, Any], expected: Quantization) -> None:
    assert parse(config) == expected
    assert expected.is_float == (expected.method == "fp8")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], r"quantization_config is \[\]; it must be an object"),
        ({}, "quant_method is ''; supported are gptq, awq, fp8, fbgemm_fp8 and compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported are gptq, awq"),
        (GPTQ | {"bits": 8}, "bits is 8; 4 is supported; use another file"),
        (GPTQ | {"bits": "4"}, "bits is '4'; it must be an integer"),
        (GPTQ | {"group_size": 48}, "group_size is 48; it must be a multiple of 32, or -1"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": 2**30}, "group_size is 1073741824"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; gptq and gptq_v2 are supported"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format"),
        (GPTQ | {"sym": 1}, "sym is 1; it must be true or false"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; gemm is supported"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"bits": 3}, "bits is 3"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; a list of names"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2'; e4m3 is supported"),
        (BLOCKS | {"activation_scheme": "none"}, "activation_scheme is 'none'"),
        (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; \[rows, columns\] is needed"),
        (BLOCKS | {"weight_block_size": [128, 16]}, "with columns a multiple of 32"),
        (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (BLOCKS | {"weight_block_size": [True, 128]}, "weight_block_size"),
        (compressed("float-quantized"), "config_groups is missing"),
        (compressed("int-quantized", PACKED | {"num_bits": 8}), "format is 'int-quantized' of 8-bit int weights; "),
        (compressed("pack-quantized", PACKED | {"num_bits": 8}), "format is 'pack-quantized' of 8-bit int weights"),
        (compressed("float-quantized", FLOATS | {"num_bits": 4}), "of 4-bit float weights; float-quantized of 8 bits"),
        (compressed("pack-quantized", PACKED | {"strategy": "tensor"}), "strategy is 'tensor'; group and channel"),
        (compressed("pack-quantized", PACKED | {"group_size": 16}), "group_size is 16"),
        (compressed("float-quantized", FLOATS | {"strategy": "token"}), "strategy is 'token'"),
        (compressed("float-quantized", FLOATS | {"symmetric": False}), "symmetric is False"),
        (compressed("float-quantized", FLOATS, sparsity_config={"format": "sparse-24"}), "sparsity_config is"),
        (compressed("pack-quantized", PACKED, transform_config={"config_groups": {}}), "transform_config is"),
        (compressed("pack-quantized", PACKED, PACKED | {"group_size": 64}), "has 2 different schemes"),
        ({**compressed("float-quantized"), "config_groups": {"a": 1}}, "config_groups.a is 1; an object is needed"),
        (compressed("float-quantized", FLOATS, ignore=[1]), r"ignore is \[1\]; a list of names"),
    ],
)
def test_what_is_not_supported_names_the_field_the_value_and_what_would_do(config: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        parse(config)
    assert str(caught.value).startswith("config.json: ") and caught.value.param
