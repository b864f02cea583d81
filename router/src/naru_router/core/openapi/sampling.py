"""The fields that all generating endpoints share, with the ranges that are checked. Pure."""

from __future__ import annotations

from naru_router.core.openapi.words import Schema, array, boolean, either, free, integer, number, text
from naru_router.core.sampling import (
    INT32_MAX,
    INTEGER_RANGES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBER_RANGES,
)

_ABOUT = {
    "temperature": "0 is greedy.",
    "top_p": "Mass of the nucleus.",
    "min_p": "Tokens below this share of the best one's probability go.",
    "presence_penalty": "Taken once from each token that is in the output.",
    "frequency_penalty": "Taken for each time that a token is in the output.",
    "repetition_penalty": "Over tokens of prompt and output.",
    "top_k": "Candidates kept; 0 and -1 keep all.",
    "seed": "Equal requests with equal seeds give equal answers; absent: a fresh one.",
    "max_tokens": "Most tokens of the output; absent: what is left of the context.",
    "min_tokens": "The end of sequence and stops are not obeyed before so many tokens.",
    "n": "Choices.",
}


def sampling_fields() -> dict[str, Schema]:
    """How to pick tokens: the same for chats and completions."""
    fields: dict[str, Schema] = {
        name: number(low, high, _ABOUT.get(name, "")) for name, (low, high) in NUMBER_RANGES.items()
    }
    fields |= {name: integer(low, high, _ABOUT.get(name, "")) for name, (low, high) in INTEGER_RANGES.items()}
    stop = text(minLength=1, maxLength=MAX_STOP_CHARS)
    ids = integer(0, INT32_MAX)
    stops = array(stop, most=MAX_STOP_STRINGS)
    fields["stop"] = either(stop, stops, about="Texts that end an answer, and are not in it.")
    fields["stop_token_ids"] = array(ids, "Tokens that end an answer.", most=MAX_STOP_TOKEN_IDS)
    bias = {"type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"}}
    fields["logit_bias"] = {
        **bias,
        "additionalProperties": number(-100, 100),
        "description": "Added to the logits of tokens, by their ids.",
    }
    fields["ignore_eos"] = boolean("Go on after the end of sequence.")
    return fields


def stream_fields() -> dict[str, Schema]:
    """Whether the answer is streamed."""
    return {
        "stream": boolean("Server-sent events in place of one reply."),
        "stream_options": {**free("Only with `stream`."), "properties": {"include_usage": boolean()}},
        "user": text("Names the end user; changes nothing."),
    }
