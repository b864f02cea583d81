"""Tiny models in the layouts of other quantizers, written with numpy alone, and the weights that they stand for.

Layouts are spelt out here on their own, as their authors' packers write them: GPTQ (AutoGPTQ and GPTQModel), AWQ
(AutoAWQ gemm), packed integers and 8-bit floats (compressed-tensors), and 8-bit floats in blocks (DeepSeek V3, Qwen).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from float_codes import FLOATS, float_codes
from tiny_models import TinySpec, Weights, config_of, weights_of, write_json, write_model

Array = npt.NDArray[Any]
Stored = dict[str, tuple[str, Array]]
"""Name to type, as safetensors call it, and elements: of floats, or their bits."""

SPEC = TinySpec(hidden_size=128, intermediate_size=256, num_layers=1, num_heads=4, num_kv_heads=2, max_positions=128)
_DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}


@dataclass(frozen=True)
class Scheme:
    """A way to quantize: what config.json says, and a module's tensors with the (rows, columns) they stand for."""

    config: dict[str, Any]
    module: Callable[[Array], tuple[Stored, Array]]


def integers_of(weight: Array, group: int, *, symmetric: bool) -> tuple[Array, Array, Array]:
    """Integers 0 to 15 (rows, columns), zeros and float16 scales (rows, groups) that are nearest to a weight."""
    groups = weight.reshape(len(weight), -1, weight.shape[1] if group == -1 else group)
    if symmetric:
        scales = (np.abs(groups).max(axis=2) / 7.5).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        least = np.minimum(groups.min(axis=2), 0)
        scales = ((np.maximum(groups.max(axis=2), 0) - least) / 15).astype(np.float16)
        zeros = np.rint(-least / scales).clip(0, 15).astype(int)
    integers = np.rint(groups / scales[:, :, None].astype(np.float64) + zeros[:, :, None]).clip(0, 15).astype(int)
    return integers.reshape(weight.shape), zeros, scales


def values_of(integers: Array, zeros: Array, scales: Array) -> Array:
    """What they stand for, float64."""
    each = integers.shape[1] // zeros.shape[1]
    values: Array = (integers - np.repeat(zeros, each, 1)) * np.repeat(scales.astype(np.float64), each, 1)
    return values


def words(nibbles: Array, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight neighbours of the last axis in one word of 32 bits: nibble i, from the lowest, is neighbour order[i]."""
    eights = nibbles.astype(np.uint32).reshape(*nibbles.shape[:-1], -1, 8)
    found = np.zeros(eights.shape[:-1], np.uint32)
    for i, neighbour in enumerate(order):
        found |= eights[..., neighbour] << np.uint32(4 * i)
    return found.view(np.int32)


def gptq(group: int, *, symmetric: bool, version: int = 1) -> Scheme:
    """Words along the columns, turned; zeros along the rows, less one in the first version."""

    def module(weight: Array) -> tuple[Stored, Array]:
        integers, zeros, scales = integers_of(weight, group, symmetric=symmetric)
        stored_zeros = words(zeros.T)
        if version == 1:
            stored_zeros = (stored_zeros.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        columns = weight.shape[1]
        found = {
            "qweight": words(integers).T,
            "qzeros": stored_zeros,
            "scales": scales.T,
            "g_idx": (np.arange(columns) // (columns // zeros.shape[1])).astype(np.int32),
        }
        return _typed(found), values_of(integers, zeros, scales)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": symmetric}
    return Scheme(config | ({} if version == 1 else {"checkpoint_format": "gptq_v2"}), module)


def awq(group: int) -> Scheme:
    """Words along the rows, even neighbours first."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def module(weight: Array) -> tuple[Stored, Array]:
        integers, zeros, scales = integers_of(weight, group, symmetric=False)
        found = {"qweight": words(integers.T, order), "qzeros": words(zeros.T, order), "scales": scales.T}
        return _typed(found), values_of(integers, zeros, scales)

    return Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, module
    )


def packed(group: int, *, symmetric: bool) -> Scheme:
    """Compressed-tensors' words along the columns; zeros along the rows."""

    def module(weight: Array) -> tuple[Stored, Array]:
        integers, zeros, scales = integers_of(weight, group, symmetric=symmetric)
        found = {
            "weight_packed": words(integers),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            found["weight_zero_point"] = words(zeros.T).T
        return _typed(found), values_of(integers, zeros, scales)

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    if group != -1:
        weights |= {"strategy": "group", "group_size": group}
    return Scheme(compressed("pack-quantized", weights), module)


def compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def floats(strategy: str) -> Scheme:
    """8-bit floats with one scale, one a row (of bfloat16), or one for 128 x 128."""

    def module(weight: Array) -> tuple[Stored, Array]:
        tall, wide = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (128, 128)}[strategy]
        rows = [slice(at, at + tall) for at in range(0, weight.shape[0], tall)]
        columns = [slice(at, at + wide) for at in range(0, weight.shape[1], wide)]
        # Bits of bfloat16: the upper half of a float32.
        scales = np.array([[np.abs(weight[r, c]).max() / 448 for c in columns] for r in rows], np.float32)
        bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
        if strategy == "channel":
            scales = (bits.astype(np.uint32) << 16).view(np.float32)
        wide_scales = np.repeat(np.repeat(scales.astype(np.float64), tall, 0), wide, 1)[
            : len(weight), : weight.shape[1]
        ]
        codes = float_codes(weight / wide_scales)
        name = "weight_scale_inv" if strategy == "block" else "weight_scale"
        scale = (
            ("BF16", bits) if strategy == "channel" else ("F32", scales.reshape(()) if strategy == "tensor" else scales)
        )
        return {"weight": ("F8_E4M3", codes), name: scale}, FLOATS[codes] * wide_scales

    if strategy == "block":
        config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    elif strategy == "tensor":
        config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    else:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        config = compressed("float-quantized", weights)
    return Scheme(config, module)


SCHEMES: dict[str, Scheme] = {
    "gptq, groups of 128": gptq(128, symmetric=True),
    "gptq, groups of 64 with zeros": gptq(64, symmetric=False, version=2),
    "gptq, groups of 32 with zeros": gptq(32, symmetric=False),
    "gptq, whole rows": gptq(-1, symmetric=True, version=2),
    "awq, groups of 64": awq(64),
    "awq, groups of 128": awq(128),
    "packed, groups of 32": packed(32, symmetric=True),
    "packed, whole rows with zeros": packed(-1, symmetric=False),
    "floats, one scale": floats("tensor"),
    "floats, scales of rows": floats("channel"),
    "floats, scales of blocks": floats("block"),
}


def quantized(weights: Weights, scheme: Scheme, modules: tuple[str, ...] = ("_proj",)) -> tuple[Stored, Weights]:
    """A model's tensors with these modules quantized, and the weights that they stand for."""
    stored: Stored = {}
    meant: Weights = {}
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if module != name and module.endswith(modules):
            own, meaning = scheme.module(values.astype(np.float64))
            stored |= {f"{module}.{part}": tensor for part, tensor in own.items()}
            meant[name] = meaning.astype(np.float32)
        else:
            stored |= _typed({name: values})
            meant[name] = values
    return stored, meant


def write_quantized(
    folder: Path, scheme: Scheme, spec: TinySpec = SPEC, modules: tuple[str, ...] = ("_proj",)
) -> Weights:
    """Writes a whole model folder; returns the weights that it stands for."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, spec)
    stored, meant = quantized(weights_of(spec), scheme, modules)
    write_stored(folder / "model.safetensors", stored)
    write_json(folder / "config.json", config_of(spec) | {"quantization_config": scheme.config})
    return meant


def write_stored(path: Path, stored: Stored) -> None:
    """Writes a safetensors file with tensors of any type."""
    header, data = dict[str, Any](), b""
    for name, (dtype, elements) in stored.items():
        raw = np.ascontiguousarray(elements).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(elements.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _typed(arrays: dict[str, Array]) -> Stored:
    return {name: (_DTYPES[array.dtype.name], array) for name, array in arrays.items()}
