"""Whether a tokenized request can be served by a model, decided before any of it reaches the engine.

Called by the server. Looks at one request and the model's fixed limits, never at the load of the moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_worker.core.request import PriorOutput
from naru_worker.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Fixed facts of a loaded model."""

    max_model_len: int
    """Prompt and output together, tokens; never more than the KV pool holds."""
    vocab_limit: int
    """Ids below it can be drawn: the smaller of embedding and tokenizer."""
    max_token_bytes: int = 256
    """Longest text of one token, UTF-8 bytes."""


def check_prompt_text(num_bytes: int, limits: RequestLimits) -> None:
    """Refuses text that is too long whatever its tokens are, before time is spent on them.

    Raises:
        ContextLengthExceeded: at least `num_bytes / max_token_bytes` tokens are too many.
    """
    least = -(-num_bytes // limits.max_token_bytes)
    if least > limits.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_bytes} bytes, at least {least} tokens; the model takes {limits.max_model_len} tokens "
            "in prompt and output together; shorten it",
            param="prompt",
        )


def resolve_params(prompt_token_ids: tuple[int, ...], params: SamplingParams, limits: RequestLimits) -> SamplingParams:
    """The parameters with `max_tokens` filled in, once the request is known to fit.

    Ids of the prompt itself are the scheduler's to check.

    Raises:
        InvalidRequest: a bias or stop token has an id outside the vocabulary.
        ContextLengthExceeded: prompt and output do not fit into `max_model_len`.
    """
    length, longest = len(prompt_token_ids), limits.max_model_len
    room = longest - length
    if room < 0 or (room == 0 and params.max_tokens != 0):
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens; the model takes {longest}, prompt and output together; shorten it",
            param="prompt",
        )
    _check_ids("logit_bias", tuple(token_id for token_id, _ in params.logit_bias), limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    if params.max_tokens is None:
        return dataclasses.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    if params.max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {length} tokens and max_tokens is {params.max_tokens}, together "
            f"{length + params.max_tokens}; the model takes {longest}; shorten it, or lower max_tokens to {room}",
            param="max_tokens",
        )
    return params


def check_prior(prior: Iterable[PriorOutput], limits: RequestLimits) -> None:
    """Checks the tokens of prior output; whether it fits the request is the scheduler's to check.

    Raises:
        InvalidRequest: an id that this model could not have drawn.
    """
    for choice in prior:
        _check_ids("prior", choice.token_ids, limits)


def _check_ids(param: str, token_ids: tuple[int, ...], limits: RequestLimits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_limit:
            raise InvalidRequest(
                f"{param} has token id {token_id}; ids go from 0 to {limits.vocab_limit - 1}", param=param
            )
