"""The body of POST /v1/completions, checked. Built by the HTTP edge, read by the request's life."""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.chat_request import apply_prompt_logprobs, read_model, read_stream
from naru_router.core.fields import Fields, check_integer, check_text, refuse
from naru_router.core.sampling import INT32_MAX, MAX_LOGPROBS, read_sampling
from naru_router.core.search import read_search
from naru_router.core.structured import read_structured
from naru_router.core.unsupported import refuse_unsupported_completion

MAX_PROMPTS = 256
"""Most prompts of one request; each is a request of its own on a worker."""
MAX_TOTAL_CHOICES = 1024
"""Most prompts × n of one request."""

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """What a completion client asked for. Choice ``p * n + i`` is the i-th answer to prompt p."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    """Never changed after it is built."""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    best_of: int = 0
    """Choices that are made for each prompt, of which the best `n` are given; 0: n."""
    tells_prompt_logprobs: bool = False
    """The answer has a field of the prompt's log probabilities, too."""


def parse_completion(body: dict[str, object]) -> CompletionCall:
    """Reads a completion body. Unknown fields are ignored; an absent max_tokens means what is left of the context.

    Raises:
        InvalidRequest: naming the field.
    """
    fields = Fields(body)
    model = read_model(fields)
    refuse_unsupported_completion(fields)
    prompts = _read_prompts(fields.get("prompt"))
    sampling = read_sampling(fields)
    stream, include_usage = read_stream(fields)
    best_of = read_search(fields, sampling, is_stream=stream)
    _check_choices(len(prompts), sampling, best_of)
    structured = read_structured(fields)
    if structured is not None:
        sampling.structured.CopyFrom(structured)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    echo = fields.boolean("echo") or False
    if logprobs is not None:
        sampling.logprobs = logprobs
    if echo and (logprobs is not None or any(not isinstance(p, str) for p in prompts)):
        # Token ids become text on the worker only: its prompt positions carry the text to echo.
        sampling.prompt_logprobs = logprobs or 0
    tells_prompt = fields.get("prompt_logprobs") is not None
    if tells_prompt:
        if echo and logprobs is not None and fields.get("prompt_logprobs") != logprobs:
            message = "prompt_logprobs and logprobs differ, and echo is true: send the same number, or one of them"
            raise InvalidRequest(message, param="prompt_logprobs")
        apply_prompt_logprobs(fields, sampling, is_stream=stream)
    return CompletionCall(model, prompts, sampling, stream, include_usage, echo, best_of, tells_prompt)


def _check_choices(num_prompts: int, sampling: SamplingParams, best_of: int) -> None:
    count = max(sampling.n if sampling.HasField("n") else 1, best_of, sampling.beam_width)
    if num_prompts * count > MAX_TOTAL_CHOICES:
        message = f"prompts × n is {num_prompts * count}; at most {MAX_TOTAL_CHOICES} are allowed"
        raise InvalidRequest(message, param="best_of" if best_of else "n")


def _read_prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (check_text("prompt", value),)
    wanted = "a string, an array of strings, an array of token ids, or an array of such arrays; none may be empty"
    if not isinstance(value, list) or not value:
        refuse("prompt", value, wanted)
    if isinstance(value[0], int):
        return (_read_token_ids("prompt", value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt")
    prompts: list[Prompt] = []
    for i, item in enumerate(value):
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append(check_text(f"prompt[{i}]", item))
        elif isinstance(item, list) and item and isinstance(value[0], list):
            prompts.append(_read_token_ids(f"prompt[{i}]", item))
        else:
            refuse(f"prompt[{i}]", item, f"like the others: prompt must be {wanted}")
    return tuple(prompts)


def _read_token_ids(path: str, values: list[object]) -> tuple[int, ...]:
    return tuple(check_integer(f"{path}[{i}]", value, 0, INT32_MAX) for i, value in enumerate(values))
