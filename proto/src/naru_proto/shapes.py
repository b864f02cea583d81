"""Shapes of models and what they take of memory, as plain values.

Called wherever bytes are promised before a model is loaded: validation, placement, admission, `naru plan`. All of them
must agree to the byte, so the arithmetic stands here once. Reads no files: a worker that has a model's files open knows
the exact weights and passes them in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from naru_proto.errors import InvalidRequest

KVDtype = Literal["float32", "float16", "int8"]
"""Of the KV cache: `kvCacheDtype` of a model, where ``auto`` is float16 on CPUs (and float32 on the backend `ref`)."""
_ELEMENT_BYTES = {"float32": 4, "float16": 2}
_SCALE_BYTES = 4
_REGISTER_ELEMENTS = 16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How numbers lie in memory: blocks of `block_size` weights in `block_bytes` bytes, along a matrix's rows."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight, scales included."""
        return 8 * self.block_bytes / self.block_size

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of one row; a row that is not whole blocks is padded to them."""
        return -(-num_columns // self.block_size) * self.block_bytes

    def matrix_bytes(self, num_rows: int, num_columns: int) -> int:
        """Bytes of a matrix."""
        return num_rows * self.row_bytes(num_columns)


WEIGHT_FORMATS = {
    name: WeightFormat(name, block_size, block_bytes)
    for name, block_size, block_bytes in (
        ("f32", 1, 4),
        ("f16", 1, 2),
        ("bf16", 1, 2),
        ("q8_0", 32, 34),
        ("q4_0", 32, 18),
        ("q4_1", 32, 20),
        ("q4_k", 256, 144),
        ("q6_k", 256, 210),
    )
}
"""Formats by name: plain floats, and GGUF's blocks (scales and minima included)."""


def weight_format(name: str) -> WeightFormat:
    """The format of that name.

    Raises:
        InvalidRequest: there is none; names the known ones.
    """
    try:
        return WEIGHT_FORMATS[name]
    except KeyError:
        known = ", ".join(WEIGHT_FORMATS)
        raise InvalidRequest(f"weight format {name!r} is not known: use one of {known}", param="format") from None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The counts that decide a decoder's size. All positive; `num_heads` is a multiple of `num_kv_heads`.

    Raises:
        InvalidRequest: a count is not positive or the heads do not fit each other; names the field.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp: Literal["gated", "plain"] = "gated"
    """gated: gate, up and down matrices (SwiGLU). plain: up and down (GELU)."""
    norm: Literal["rms", "layer"] = "rms"
    """layer: each norm has a bias beside its weight."""
    is_head_tied: bool = False
    """Whether the output head is the embedding."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    num_learned_positions: int = 0
    """Rows of a learned position table; 0 where positions are rotary."""
    has_qk_norm: bool = False
    """Whether each head's query and key pass a norm."""
    num_experts: int = 0
    """Of each layer that has experts in place of an MLP; 0: no layer has. Experts are gated."""
    num_chosen_experts: int = 0
    """That a token goes through."""
    expert_size: int = 0
    """Width of one expert's inner layer."""
    shared_expert_size: int = 0
    """Width of the inner layer of an expert that all tokens go through; 0: there is none."""
    num_plain_layers: int = 0
    """Layers with a plain MLP beside those with experts."""

    def __post_init__(self) -> None:
        """Refuses shapes no model has."""
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: it must be at least 1", param=name)
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequest(
                f"num_heads {self.num_heads!r} is not a multiple of num_kv_heads {self.num_kv_heads!r}: "
                "correct one of them",
                param="num_kv_heads",
            )
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        for name, low, high in (
            ("num_chosen_experts", 1, self.num_experts),
            ("expert_size", 1, 2**31),
            ("num_plain_layers", 0, self.num_layers - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}: it must be from {low} to {high}", param=name)

    @property
    def num_expert_layers(self) -> int:
        """Layers that have experts."""
        return self.num_layers - self.num_plain_layers if self.num_experts else 0

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes one copy of a model takes."""

    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes


def matrices(shape: ModelShape) -> tuple[tuple[int, int, int], ...]:
    """(how many, rows, columns) of the matrices of all layers, routers left out."""
    hidden, num_layers, num_sparse = shape.hidden_size, shape.num_layers, shape.num_expert_layers
    found = [(num_layers, shape.q_size, hidden), (2 * num_layers, shape.kv_size, hidden)]
    found.append((num_layers, hidden, shape.q_size))
    num_ups = 2 if shape.mlp == "gated" else 1
    for count, inner, ups in (
        (num_layers - num_sparse, shape.intermediate_size, num_ups),
        (num_sparse * shape.num_experts, shape.expert_size, 2),
        (num_sparse if shape.shared_expert_size else 0, shape.shared_expert_size, 2),
    ):
        if count:
            found += [(ups * count, inner, hidden), (count, hidden, inner)]
    return tuple(found)


def num_vector_weights(shape: ModelShape) -> int:
    """Norm weights, biases and routers over the whole model: small, and never quantized."""
    norm = shape.hidden_size * (2 if shape.norm == "layer" else 1)
    num_ups = 2 if shape.mlp == "gated" else 1
    layer = 2 * norm
    layer += shape.has_qkv_bias * (shape.q_size + 2 * shape.kv_size)
    layer += shape.has_o_bias * shape.hidden_size
    layer += shape.has_mlp_bias * (num_ups * shape.intermediate_size + shape.hidden_size)
    layer += shape.has_qk_norm * 2 * shape.head_dim
    routers = shape.num_expert_layers * (shape.num_experts + bool(shape.shared_expert_size)) * shape.hidden_size
    return shape.num_layers * layer + norm + routers


def num_parameters(shape: ModelShape) -> int:
    """Parameters of the model; a tied head counts once."""
    tables = shape.vocab_size * (1 if shape.is_head_tied else 2) + shape.num_learned_positions
    layers = sum(count * rows * columns for count, rows, columns in matrices(shape))
    return tables * shape.hidden_size + layers + num_vector_weights(shape)


def weight_bytes(shape: ModelShape, of_layers: WeightFormat, tables: WeightFormat | None = None) -> int:
    """Bytes of the weights: `of_layers` for layers, `tables` (the same if None) for embedding and head, f32 else."""
    table = tables or of_layers
    f32 = WEIGHT_FORMATS["f32"]
    layers = sum(count * of_layers.matrix_bytes(rows, columns) for count, rows, columns in matrices(shape))
    num_tables = 1 if shape.is_head_tied else 2
    return (
        layers
        + num_tables * table.matrix_bytes(shape.vocab_size, shape.hidden_size)
        + f32.matrix_bytes(shape.num_learned_positions, shape.hidden_size)
        + num_vector_weights(shape) * f32.block_bytes
    )


def kv_bytes_per_token(shape: ModelShape, dtype: KVDtype = "float16") -> int:
    """Bytes of keys and values one token takes over all layers, as the CPU engine keeps them.

    A head's keys and values are `head_dim` elements each. Values, and keys of bytes, are padded to whole registers of
    16 elements; bytes have one float32 scale beside a head's keys and one beside its values.
    """
    padded = -(-shape.head_dim // _REGISTER_ELEMENTS) * _REGISTER_ELEMENTS
    if dtype == "int8":
        head_bytes = 2 * (padded + _SCALE_BYTES)
    else:
        head_bytes = (shape.head_dim + padded) * _ELEMENT_BYTES[dtype]
    return shape.num_layers * shape.num_kv_heads * head_bytes


def kv_bytes(shape: ModelShape, num_tokens: int, block_size: int, dtype: KVDtype = "float16") -> int:
    """Bytes of the KV blocks that hold `num_tokens` tokens of one sequence; the last block counts whole."""
    num_blocks = -(-num_tokens // block_size)
    return num_blocks * block_size * kv_bytes_per_token(shape, dtype)


def max_kv_tokens(shape: ModelShape, num_bytes: int, block_size: int, dtype: KVDtype = "float16") -> int:
    """Tokens whose KV blocks fit in `num_bytes`: whole blocks only, 0 where not one fits."""
    block_bytes = block_size * kv_bytes_per_token(shape, dtype)
    return max(num_bytes, 0) // block_bytes * block_size


def footprint(
    shape: ModelShape,
    of_layers: WeightFormat,
    tables: WeightFormat | None = None,
    *,
    num_kv_tokens: int,
    block_size: int,
    workspace_bytes: int = 0,
    kv_dtype: KVDtype = "float16",
) -> Footprint:
    """What one copy takes with room for `num_kv_tokens` tokens of KV cache."""
    kv = kv_bytes(shape, num_kv_tokens, block_size, kv_dtype)
    return Footprint(weight_bytes(shape, of_layers, tables), kv, workspace_bytes)
