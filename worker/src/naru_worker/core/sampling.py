"""Sampling parameters of one request: what the client asked for, checked once.

Built by the server from the wire, read by scheduler, sampler and detokenizer. Frozen: a request never changes its mind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest

MAX_LOGPROBS = 20
"""Most alternatives a position may report; OpenAI's own limit."""

MAX_N = 128
"""Most choices of one request."""

MAX_STOP_STRINGS = 16
"""Most stop strings of one request; each costs a scan per token."""

MAX_STOP_CHARS = 1024
"""Longest stop string: text is withheld while a match may still come."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens.

    The documented order, the same on every path: repetition, presence and frequency penalties, logit bias, temperature,
    top-k, top-p over the renormalised rest, min-p over the same rest; then one draw. At least one token always remains.
    Logprobs are those of the raw model distribution, before all of it.
    """

    temperature: float = 1.0
    """0 is greedy: the highest logit after penalties and bias, lowest id on ties. Below 1e-5 counts as 0."""
    top_p: float = 1.0
    """Nucleus mass in [0, 1]; the best token always stays, so 0 is greedy."""
    top_k: int = 0
    """Candidates kept; 0 and -1 keep all."""
    min_p: float = 0.0
    """Tokens below this share of the best token's probability go; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from each token already in the output; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied; > 0."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias in [-100, 100]), sorted by id."""
    seed: int | None = None
    """In [0, 2**64). None: the server draws a fresh one, so unseeded requests differ."""
    max_tokens: int | None = None
    """Most output tokens; None: what is left of max_model_len. 0 computes the prompt only."""
    min_tokens: int = 0
    """EOS and stops are not obeyed before this many output tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings; never part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Choices; choice i draws with (seed, i)."""
    logprobs: int | None = None
    """None: none. k: the chosen token's and the k best at each output position."""
    prompt_logprobs: int | None = None
    """None: none. k: the same for each prompt token; such a request skips prefix cache reads."""

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            InvalidRequest: naming the parameter, its value and the range.
        """
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 100.0):
            raise InvalidRequest(
                f"repetition_penalty is {self.repetition_penalty!r}; it must be above 0 and at most 100",
                param="repetition_penalty",
            )
        _in_range("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _in_range("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _in_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it", param="min_tokens"
            )
        _in_range("n", self.n, 1, MAX_N)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                raise InvalidRequest(f"logit_bias has token id {token_id}; ids start at 0", param="logit_bias")
            _in_range("logit_bias", bias, -100.0, 100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", param="stop")
        for text in self.stop:
            if not text or len(text) > MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(text)} characters; 1 to {MAX_STOP_CHARS} are allowed", param="stop"
                )

    @property
    def is_greedy(self) -> bool:
        """True when no draw is needed."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0 or self.min_p == 1.0


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value!r}; it must be in [{low}, {high}]", param=name)
