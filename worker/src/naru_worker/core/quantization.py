"""`quantization_config` of config.json: how the matrices of a checkpoint are quantized.

Called when a checkpoint folder is opened, and by whoever plans for one. Pure: which matrices are quantized at all is
told by the tensors, and what they hold is checked where they are read.

Source: the configs that GPTQModel / AutoGPTQ, AutoAWQ, transformers, AutoFP8 and compressed-tensors write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from naru_worker.core.fields import Fields, shown

Method = Literal["gptq", "awq", "packed", "fp8"]
"""Whose layout the tensors have; packed: compressed-tensors' words of integers."""

_GROUPS = "a multiple of 32, or -1 for one scale a row"
_REMEDY = "use another file of the model, such as GPTQ, AWQ, FP8 or GGUF"
_MAX_GROUP = 2**20
_COMPRESSED: dict[str, Method] = {"float-quantized": "fp8", "naive-quantized": "fp8", "pack-quantized": "packed"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What all quantized matrices of a checkpoint have in common."""

    method: Method
    group_size: int = -1
    """Columns that share a scale; -1: all of a row. Of 8-bit floats: see `block`."""
    is_symmetric: bool = True
    """Of 4-bit integers: whether 8 stands for 0 everywhere."""
    stores_zero_minus_one: bool = False
    block: tuple[int, int] | None = None
    """Rows and columns of 8-bit floats that share a scale; None: a matrix has one scale, or one a row."""
    plain_modules: frozenset[str] = frozenset()
    """Modules that the config says are not quantized, by their whole names."""

    @property
    def is_float(self) -> bool:
        """8-bit floats; else 4-bit integers."""
        return self.method == "fp8"


def parse_quantization(fields: Fields) -> Quantization | None:
    """What config.json says; None: nothing is quantized.

    Raises:
        LoadError: a method, format or number that is not supported; names what is.
    """
    if not fields.has("quantization_config"):
        return None
    own = Fields(f"{fields.file}: quantization_config", fields.table("quantization_config"))
    method = own.text("quant_method", "")
    if method == "gptq":
        return _gptq(own)
    if method == "awq":
        return _awq(own)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(own)
    if method == "compressed-tensors":
        return _compressed(own)
    own.fail(
        "quant_method",
        f"is {shown(method)}; supported are gptq, awq, fp8, fbgemm_fp8 and compressed-tensors, and GGUF files",
    )


def _gptq(own: Fields) -> Quantization:
    _check_bits(own)
    version = own.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2") or own.boolean("is_marlin_format", False):
        own.fail("checkpoint_format", f"is {shown(version)}; gptq and gptq_v2 are supported; {_REMEDY}")
    return Quantization(
        method="gptq",
        group_size=_group_size(own),
        is_symmetric=own.boolean("sym", True),
        stores_zero_minus_one=version == "gptq",
        plain_modules=_names(own, "modules_to_not_convert"),
    )


def _awq(own: Fields) -> Quantization:
    _check_bits(own)
    version = own.text("version", "gemm")
    if version.lower() != "gemm":
        own.fail("version", f"is {shown(version)}; gemm is supported; {_REMEDY}")
    if not own.boolean("zero_point", True):
        own.fail("zero_point", f"is False; AWQ with zero points is supported; {_REMEDY}")
    return Quantization(
        method="awq",
        group_size=_group_size(own),
        is_symmetric=False,
        plain_modules=_names(own, "modules_to_not_convert"),
    )


def _fp8(own: Fields) -> Quantization:
    kind = own.text("fmt", "e4m3")
    if kind != "e4m3":
        own.fail("fmt", f"is {shown(kind)}; e4m3 is supported")
    scheme = own.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        own.fail("activation_scheme", f"is {shown(scheme)}; dynamic and static are supported")
    return Quantization(
        method="fp8",
        block=_block(own, "weight_block_size"),
        plain_modules=_names(own, "modules_to_not_convert") | _names(own, "ignored_layers"),
    )


def _compressed(own: Fields) -> Quantization:
    for name in ("sparsity_config", "transform_config"):
        if own.table(name).get("format", "other") != "dense" and own.table(name):
            own.fail(name, f"is {shown(own.table(name))}; plain quantized weights are supported; {_REMEDY}")
    groups = own.table("config_groups")
    if not groups:
        own.fail("config_groups", "is missing; the scheme of the weights is needed")
    plain = _names(own, "ignore")
    found = {_scheme(own, name, group, plain) for name, group in groups.items()}
    if len(found) > 1:
        own.fail("config_groups", f"has {len(found)} different schemes of weights; one for all is supported; {_REMEDY}")
    return found.pop()


def _scheme(own: Fields, name: str, group: object, plain: frozenset[str]) -> Quantization:
    if not isinstance(group, dict):
        own.fail(f"config_groups.{name}", f"is {shown(group)}; an object is needed")
    fields = Fields(f"{own.file}.config_groups.{name}", group)
    weights = Fields(f"{fields.file}.weights", fields.table("weights"))
    layout = fields.text("format", own.text("format", ""))
    method = _COMPRESSED.get(layout)
    bits, kind = weights.integer("num_bits", 1, 64), weights.text("type", "int")
    if method is None or (kind, bits) != (("float", 8) if method == "fp8" else ("int", 4)):
        own.fail(
            "format",
            f"is {shown(layout)} of {bits}-bit {kind} weights; float-quantized of 8 bits and pack-quantized of 4 bits "
            f"are supported; {_REMEDY}",
        )
    strategy = weights.text("strategy", "tensor")
    if method == "packed":
        group_size = _group_size(weights) if strategy == "group" else -1
        if strategy not in ("group", "channel"):
            weights.fail("strategy", f"is {shown(strategy)}; group and channel are supported for 4 bits")
        symmetric = weights.boolean("symmetric", True)
        return Quantization("packed", group_size, is_symmetric=symmetric, plain_modules=plain)
    if strategy not in ("tensor", "channel", "group", "block"):
        weights.fail("strategy", f"is {shown(strategy)}; tensor, channel, group and block are supported for 8 bits")
    if not weights.boolean("symmetric", True):
        weights.fail("symmetric", "is False; 8-bit floats without zero points are supported")
    block = _block(weights, "block_structure") if strategy == "block" else None
    if strategy == "group" and _group_size(weights) > 0:
        block = (1, _group_size(weights))
    return Quantization("fp8", block=block, plain_modules=plain)


def _check_bits(own: Fields) -> None:
    bits = own.integer("bits", 1, 64, 4)
    if bits != 4:
        own.fail("bits", f"is {bits}; 4 is supported; {_REMEDY}")


def _group_size(own: Fields) -> int:
    size = own.integer("group_size", -1, _MAX_GROUP, 128)
    if size == 0 or (size % 32 and size != -1):
        own.fail("group_size", f"is {size}; it must be {_GROUPS}")
    return size


def _block(own: Fields, name: str) -> tuple[int, int] | None:
    value = own.values.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value):
        rows, columns = value
        if 1 <= rows <= _MAX_GROUP and 32 <= columns <= _MAX_GROUP and columns % 32 == 0:
            return rows, columns
    own.fail(name, f"is {shown(value)}; [rows, columns] is needed, with columns a multiple of 32")


def _names(own: Fields, name: str) -> frozenset[str]:
    """Whole names of a list; patterns in it need no reading, as the tensors tell what is quantized."""
    values = own.values.get(name)
    if values is None:
        return frozenset()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        own.fail(name, f"is {shown(values)}; a list of names is needed")
    return frozenset(str(value) for value in values)
