"""The terms a request comes on, as its message states them: whose turn it is, how much it asks for, until when.

Read by the board before anything is done for the request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.server.task_check import task_tokens
from naru_worker.core.fair_order import Work
from naru_worker.core.sampling import SamplingParams

MAX_TENANT_CHARS = 256
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Weights beyond are taken as these: shares of a millionth serve nobody."""
MAX_TIMEOUT_S = 10.0 * 365 * 86400
_BYTES_PER_TOKEN = 4
"""Of text, about, before it is tokenized."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Checked."""

    tenant: str
    weight: float
    work: Work
    timeout_s: float
    """0: no limit."""


def terms_of(message: worker_pb2.GenerateRequest, params: SamplingParams) -> Terms:
    """Reads a request's terms.

    Raises:
        InvalidRequest: a field is out of range.
    """
    if len(message.tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest(
            f"tenant has {len(message.tenant)} characters; at most {MAX_TENANT_CHARS} are allowed", param="tenant"
        )
    weight = message.tenant_weight
    if not (weight >= 0.0 and math.isfinite(weight)):
        raise InvalidRequest(
            f"tenant_weight is {weight!r}; it must be at least 0 and finite, and 0 stands for 1", param="tenant_weight"
        )
    if not 0.0 <= message.timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"timeout_s is {message.timeout_s!r}; it must be in [0, {MAX_TIMEOUT_S:.0f}], and 0 sets no limit",
            param="timeout_s",
        )
    weight = min(max(weight, MIN_WEIGHT), MAX_WEIGHT) if weight else 1.0
    return Terms(message.tenant, weight, _work(message, params), message.timeout_s)


def _work(message: worker_pb2.GenerateRequest, params: SamplingParams) -> Work:
    if message.WhichOneof("task") is not None:
        return Work(task_tokens(message), 0, 0)
    if message.WhichOneof("prompt") == "token_ids":
        num_tokens = len(message.token_ids.ids)
    else:
        num_tokens = len(message.text) // _BYTES_PER_TOKEN
    num_prior = sum(len(prior.token_ids) for prior in message.prior)
    left = None if params.max_tokens is None else max(0, params.max_tokens - num_prior // params.n)
    return Work(num_tokens + num_prior, left, params.num_sequences)
