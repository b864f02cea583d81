"""Admission checks that need no state: whether a request could ever be served by this model and this pool.

Called by the scheduler before it takes a request. What passes here is certain to run some day, or to be
told that its memory was not given in time.
"""

from __future__ import annotations

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import Request
from naru_worker.core.scheduler_config import SchedulerConfig

TOKEN_ID_LIMIT = 2**31
"""Ids travel as signed 32-bit numbers."""


def check_request(request: Request, config: SchedulerConfig, kv: KVManager) -> None:
    """Passes or raises; changes nothing.

    Raises:
        InvalidRequest: the prompt is empty or has an id outside the vocabulary, or prior output does not fit the rest.
        ContextLengthExceeded: the prompt is too long for the model or the pool, or `n` choices for the pool.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    limit = limit_of_ids(config)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limit:
        raise InvalidRequest(
            f"the prompt has token id {low if low < 0 else high!r}; ids of this model are in [0, {limit})",
            param="prompt",
        )
    if request.prior:
        _check_prior(request, config)
    if request.params.beam_width is not None:
        _check_beams(request, config)
    _check_context(request, config)
    _check_pool(request, config, kv)


def limit_of_ids(config: SchedulerConfig) -> int:
    """Ids of the model's vocabulary are below it."""
    return TOKEN_ID_LIMIT if config.vocab_size is None else config.vocab_size


def check_num_prior(num_prior: int, num_choices: int) -> None:
    """Passes or raises: prior output is there for each choice, or for none.

    Raises:
        InvalidRequest: it is there for some, or for more than there are.
    """
    if num_prior not in (0, num_choices):
        raise InvalidRequest(f"prior has {num_prior} items for {num_choices} choices; send one for each", param="prior")


def _check_prior(request: Request, config: SchedulerConfig) -> None:
    params, prior = request.params, request.prior
    check_num_prior(len(prior), params.n)
    if all(each.is_finished for each in prior):
        raise InvalidRequest("every choice of prior is finished; nothing is left to generate", param="prior")
    if params.prompt_logprobs is not None and (prior[0].token_ids or prior[0].is_finished):
        # They leave with the first output of the first choice, which is out.
        raise InvalidRequest("prompt_logprobs is set, and the first choice has begun; leave it out", param="prior")
    room = config.max_model_len - len(request.prompt_token_ids)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    longest = max(len(each.token_ids) for each in prior if not each.is_finished)
    if longest >= most:
        raise InvalidRequest(f"prior has {longest} tokens, and the output ends at {most}", param="prior")


def _check_beams(request: Request, config: SchedulerConfig) -> None:
    width = request.params.num_sequences
    most = min(config.max_num_seqs, limit_of_ids(config) - 1)
    if width > most:
        raise InvalidRequest(
            f"beam_width is {width}; this model takes at most {most} here: sequences at once, and fewer than tokens in "
            "the vocabulary; lower it",
            param="beam_width",
        )


def _check_context(request: Request, config: SchedulerConfig) -> None:
    num_prompt = len(request.prompt_token_ids)
    num_output = 0 if request.params.max_tokens == 0 else 1
    if num_prompt + num_output > config.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and this model takes {config.max_model_len}, "
            f"at least {num_output} of them for the output; shorten the prompt",
            param="prompt",
        )


def _check_pool(request: Request, config: SchedulerConfig, kv: KVManager) -> None:
    num_prompt = len(request.prompt_token_ids)
    pool = f"the KV cache has {kv.max_usable_blocks} blocks of {kv.block_size} tokens"
    if not kv.can_ever_fit(num_prompt):
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and needs {kv.num_blocks_for(num_prompt)} KV blocks; {pool}; "
            "shorten the prompt or give the worker more KV memory",
            param="prompt",
        )
    params = request.params
    if params.num_sequences == 1:
        return
    # One choice that outgrows the pool ends there; several would go on preempting one another.
    num_output = params.max_tokens
    if num_output is None or num_prompt + num_output >= config.max_model_len:
        # "As long as it gets" is no length that was asked for: count what is certain.
        num_output = params.min_tokens
    # The last output token is drawn, but never computed.
    num_tokens = min(num_prompt + max(num_output - 1, 0), config.max_model_len)
    num_blocks = kv.num_blocks_for_choices(num_prompt, num_tokens, params.num_sequences)
    if num_blocks > kv.max_usable_blocks:
        name, what = ("n", "choices") if params.beam_width is None else ("beam_width", "beams")
        raise ContextLengthExceeded(
            f"{name} is {params.num_sequences}: that many {what} of up to {num_tokens} tokens need {num_blocks} KV "
            f"blocks; {pool}; lower {name} or max_tokens",
            param=name,
        )


def max_beam_tokens(request: Request, config: SchedulerConfig, kv: KVManager) -> int:
    """Longest that a beam of this request may get, prompt and output: all beams fit the whole pool side by side.

    It depends on what there is in all, never on who else runs: a search must not end elsewhere for its company.
    """
    size = kv.block_size
    num_shared = (len(request.prompt_token_ids) - 1) // size
    num_each = (kv.max_usable_blocks - num_shared) // request.params.num_sequences
    # The last token is chosen, but never computed.
    return min(config.max_model_len, (num_shared + num_each) * size + 1)
