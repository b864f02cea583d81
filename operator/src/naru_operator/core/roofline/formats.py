"""Formats of weights and of the KV cache on GPUs: what they take and which units compute with them."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.shapes import WEIGHT_FORMATS, WeightFormat

_F16 = WEIGHT_FORMATS["f16"]
_FP8 = WeightFormat("fp8", 1, 1)
_INT4 = WeightFormat("int4", 128, 64 + 2 + 2)
# 128 weights of 4 bits have one 16-bit scale and one 16-bit zero.


@dataclass(frozen=True, slots=True)
class Weights:
    """How a model's weights lie in a GPU's memory."""

    name: str
    matrices: WeightFormat
    """Of the layers."""
    tables: WeightFormat
    """Of embedding and head."""
    is_fp8: bool = False
    """Whether the FP8 units compute with them, where a GPU has any; else they are widened to 16 bits."""


WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights("bf16", WEIGHT_FORMATS["bf16"], WEIGHT_FORMATS["bf16"]),
        Weights("f16", _F16, _F16),
        Weights("fp8", _FP8, _F16, is_fp8=True),
        Weights("int4", _INT4, _F16),
        *(Weights(name, WEIGHT_FORMATS[name], WEIGHT_FORMATS[name]) for name in ("q8_0", "q4_0", "q4_1")),
        *(Weights(name, WEIGHT_FORMATS[name], WEIGHT_FORMATS["q6_k"]) for name in ("q4_k", "q6_k")),
    )
}
"""By the name that a user writes. int4: GPTQ and AWQ in groups of 128."""

_KV_BYTES = {"float16": (2, 0), "fp8": (1, 0), "int8": (1, 4)}
# An element's bytes; those of the scale that a head's keys have, and its values.
KV_FORMATS = tuple(_KV_BYTES)


def weights_named(name: str) -> Weights:
    """The format of that name.

    Raises:
        InvalidRequest: there is none; lists the known ones.
    """
    try:
        return WEIGHTS[name]
    except KeyError:
        raise InvalidRequest(
            f"weight format {name!r} is not known: use one of {', '.join(WEIGHTS)}", param="weights"
        ) from None


def kv_token_bytes(num_kv_heads: int, head_dim: int, kv: str) -> int:
    """Bytes of the keys and values of one token in one layer.

    Raises:
        InvalidRequest: there is no such format; lists the known ones.
    """
    if kv not in _KV_BYTES:
        raise InvalidRequest(f"KV format {kv!r} is not known: use one of {', '.join(KV_FORMATS)}", param="kv")
    element, scale = _KV_BYTES[kv]
    return 2 * num_kv_heads * (head_dim * element + scale)
