"""How to sample, from the bodies of APIs that name only some of it: Naru's other fields are taken beside theirs."""

from __future__ import annotations

from collections.abc import Mapping

from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.fields import Fields
from naru_router.core.sampling import read_sampling

_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
)
"""`stop`, `n` and lengths are each API's own."""


def read_common_sampling(body: Mapping[str, object], max_tokens: int | None) -> SamplingParams:
    """The parameters that any of these APIs may name; absent ones stay absent.

    Raises:
        InvalidRequest: naming the field, its value and what it must be.
    """
    named = {name: body[name] for name in _NAMES if name in body}
    if max_tokens is not None:
        named["max_tokens"] = max_tokens
    return read_sampling(Fields(named))
