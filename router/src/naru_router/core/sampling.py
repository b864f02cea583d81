"""Sampling parameters at the edge: ranges, reading them from JSON, checking them on the public gRPC message.

One table of ranges for both edges. The worker checks again: it trusts no router.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from naru_proto.errors import InvalidRequest
from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.fields import Fields, check_integer, check_number, check_text, refuse

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128
"""Most choices of one request."""
MAX_LOGPROBS = 20
"""Most alternatives a position may report; OpenAI's own limit."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
"""Longest stop string: its text is withheld while a match may still come."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 4096
MAX_BEAM_WIDTH = 32
LENGTH_PENALTIES = (-10.0, 10.0)

NUMBER_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 100.0),
}
INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "top_k": (-1, INT32_MAX),
    "seed": (0, 2**64 - 1),
    "max_tokens": (0, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "n": (1, MAX_CHOICES),
}
_LOGPROB_RANGES = {"logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS)}
_BIAS_RANGE = (-100.0, 100.0)


def read_sampling(fields: Fields) -> SamplingParams:
    """Builds the message from a body; fields that are absent or null stay absent. Logprobs are the endpoint's own.

    Raises:
        InvalidRequest: naming the field, its value and what it must be.
    """
    params = SamplingParams()
    for name, value in fields.items():
        read = _READERS.get(name)
        if read is not None and value is not None:
            read(params, fields, name)
    if params.min_tokens:
        _check_lengths(params)
    return params


def _read_number(params: SamplingParams, fields: Fields, name: str) -> None:
    setattr(params, name, check_number(name, fields.get(name), *NUMBER_RANGES[name]))


def _read_integer(params: SamplingParams, fields: Fields, name: str) -> None:
    setattr(params, name, check_integer(name, fields.get(name), *INTEGER_RANGES[name]))


def _read_ignore_eos(params: SamplingParams, fields: Fields, name: str) -> None:
    params.ignore_eos = fields.boolean(name) or False


def _read_stops(params: SamplingParams, fields: Fields, name: str) -> None:
    params.stop.extend(_stop_texts(fields))


def _read_stop_tokens(params: SamplingParams, fields: Fields, name: str) -> None:
    params.stop_token_ids.extend(_stop_token_ids(fields))


def _read_biases(params: SamplingParams, fields: Fields, name: str) -> None:
    for token_id, bias in _logit_biases(fields):
        params.logit_bias[token_id] = bias


_READERS: dict[str, Callable[[SamplingParams, Fields, str], None]] = {
    **dict.fromkeys(NUMBER_RANGES, _read_number),
    **dict.fromkeys(INTEGER_RANGES, _read_integer),
    "ignore_eos": _read_ignore_eos,
    "stop": _read_stops,
    "stop_token_ids": _read_stop_tokens,
    "logit_bias": _read_biases,
}
"""By field: most bodies have two or three of them."""


def check_sampling(params: SamplingParams) -> None:
    """Checks a message that came over the wire as it is.

    Raises:
        InvalidRequest: naming the field, its value and what it must be.
    """
    for name, (low, high) in NUMBER_RANGES.items():
        if params.HasField(name):
            # The wire carries 32 bits: 1e-6 arrives as 9.9999999e-07.
            value = getattr(params, name)
            if not math.isfinite(value) or not (low * 0.999 if low > 0 else low) <= value <= high:
                refuse(name, value, f"a number in [{low:g}, {high:g}]")
    for name, (first, last) in (INTEGER_RANGES | _LOGPROB_RANGES).items():
        if params.HasField(name):
            check_integer(name, getattr(params, name), first, last)
    _check_stops(list(params.stop))
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for token_id in params.stop_token_ids:
        check_integer("stop_token_ids", token_id, 0, INT32_MAX)
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in params.logit_bias.items():
        check_integer("logit_bias", token_id, 0, INT32_MAX)
        check_number(f"logit_bias.{token_id}", bias, *_BIAS_RANGE)
    if params.HasField("beam_width"):
        check_integer("beam_width", params.beam_width, 1, MAX_BEAM_WIDTH)
    if params.HasField("length_penalty"):
        check_number("length_penalty", params.length_penalty, *LENGTH_PENALTIES)
    if params.HasField("structured") and params.structured.WhichOneof("kind") is None:
        raise InvalidRequest("structured has none of its kinds; set one or leave it out", param="structured")
    _check_lengths(params)


def _stop_texts(fields: Fields) -> list[str]:
    value = fields.get("stop")
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        refuse("stop", value, "a string or an array of strings")
    stops = [check_text(f"stop[{i}]", text) for i, text in enumerate(value)]
    _check_stops(stops)
    return stops


def _check_stops(stops: list[str]) -> None:
    _check_count("stop", len(stops), MAX_STOP_STRINGS)
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            refuse("stop", text, f"made of strings of 1 to {MAX_STOP_CHARS} characters")


def _stop_token_ids(fields: Fields) -> list[int]:
    value = fields.array("stop_token_ids") or []
    _check_count("stop_token_ids", len(value), MAX_STOP_TOKEN_IDS)
    return [check_integer(f"stop_token_ids[{i}]", token_id, 0, INT32_MAX) for i, token_id in enumerate(value)]


def _logit_biases(fields: Fields) -> list[tuple[int, float]]:
    value = fields.get("logit_bias")
    if value is None:
        return []
    if not isinstance(value, dict):
        refuse("logit_bias", value, "an object of token id to number")
    _check_count("logit_bias", len(value), MAX_LOGIT_BIASES)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # isdecimal alone would take digits of other scripts; eleven digits never fit 31 bits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= INT32_MAX):
            refuse("logit_bias", key, f"keyed by token ids, integers in [0, {INT32_MAX}]")
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias has token id {int(key)} twice; keep one", param="logit_bias")
        biases[int(key)] = check_number(f"logit_bias.{key}", bias, *_BIAS_RANGE)
    return list(biases.items())


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} has {count} entries; at most {most} are allowed", param=name)


def _check_lengths(params: SamplingParams) -> None:
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        message = f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}; lower it"
        raise InvalidRequest(message, param="min_tokens")
