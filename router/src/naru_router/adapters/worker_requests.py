"""Requests to workers: what a job sends beside its prompt, and ids for the calls of tools in its answer.

Used by the job maker.
"""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.core.chat_parts import OutputReader
from naru_router.core.tools.plan import OutputPlan
from naru_router.core.tools.styles import Style

_SHORT_ID_CHARS = string.ascii_letters + string.digits


def new_request(
    model: str, sampling: inference_pb2.SamplingParams, *, add_special_tokens: bool
) -> worker_pb2.GenerateRequest:
    """A request without its prompt, that another worker can go on with: seeded, and told in token ids."""
    request = worker_pb2.GenerateRequest(
        model=model, add_special_tokens=add_special_tokens, sampling=sampling, return_token_ids=True
    )
    if not sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)
    return request


def ask_for(output: OutputPlan, style: Style, request: worker_pb2.GenerateRequest) -> Callable[[], OutputReader] | None:
    """Puts what is planned of the output into the request; what makes readers of its choices, where it takes one."""
    if output.structured is not None:
        request.sampling.structured.CopyFrom(output.structured)
    if output.shows_special_tokens:
        request.show_special_tokens = True
    if output.make_reader is None:
        return None
    return functools.partial(output.make_reader, _new_short_id if style.has_short_ids else _new_id)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_short_id() -> str:
    """Of nine letters and digits, which is all that some templates take."""
    return "".join([secrets.choice(_SHORT_ID_CHARS) for _ in range(9)])


def num_choices(sampling: inference_pb2.SamplingParams) -> int:
    """Of an answer."""
    return sampling.n if sampling.HasField("n") else 1
