"""Sampling parameters of one request: what the client asked for, checked once.

Built by the server from the wire, read by scheduler, sampler and detokenizer. Frozen: a request never changes its mind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_worker.core.structured import StructuredOutput

MAX_LOGPROBS = 20
"""Most alternatives a position may report; OpenAI's own limit."""

MAX_N = 128
"""Most choices of one request."""

MAX_BEAM_WIDTH = 32
"""Most beams of one request."""

MAX_BEAM_LOGPROBS = 2**20
"""Most log probabilities of one search: they are kept for all beams until its end, about 100 bytes each."""

MAX_BEAM_STOP_TOKENS = 64
"""Most stop token ids of a beam search: each is one candidate more at every beam, so that enough others remain."""

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
    beam_width: int | None = None
    """None: tokens are drawn. k: beam search over k beams; the choices are the `n` best. See `core.beam_search`."""
    length_penalty: float = 1.0
    """Of a beam search: a text's score is the sum of its log probabilities / length ** length_penalty."""
    structured: StructuredOutput | None = None
    """What the text must be; None: anything. Tokens that it excludes are impossible, before all of the rest; the end of
    it ends the choice, be it before `min_tokens`."""

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

        self._check_beams()

    def _check_beams(self) -> None:
        _in_range("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.beam_width is None:
            if self.length_penalty != 1.0:
                raise InvalidRequest(
                    f"length_penalty is {self.length_penalty!r}, and nothing is searched; set beam_width, or leave it "
                    "out",
                    param="length_penalty",
                )
            return
        _in_range("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise InvalidRequest(
                f"n is {self.n}, above beam_width {self.beam_width}: there are no more beams; lower n", param="n"
            )
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens is 0, and a beam search needs 1 at least; raise it", param="max_tokens")
        if len(self.stop_token_ids) > MAX_BEAM_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; with beam_width at most {MAX_BEAM_STOP_TOKENS}",
                param="stop_token_ids",
            )
        num_logprobs = 0 if self.logprobs is None else self.beam_width * (self.max_tokens or 0) * (1 + self.logprobs)
        if num_logprobs > MAX_BEAM_LOGPROBS:
            raise InvalidRequest(
                f"logprobs is {self.logprobs}: for {self.beam_width} beams of up to {self.max_tokens} tokens that is "
                f"{num_logprobs} numbers to keep, above {MAX_BEAM_LOGPROBS}; lower it or max_tokens",
                param="logprobs",
            )
        if self.structured is not None:
            raise InvalidRequest(
                "beam search knows no structured output; leave out beam_width, or ask for free text",
                param=self.structured.param,
            )
        self._check_nothing_is_drawn()

    def _check_nothing_is_drawn(self) -> None:
        # 0 and 1 are what clients send who want no sampling; both change nothing here.
        unused = {
            "temperature": self.temperature in (0.0, 1.0),
            "top_p": self.top_p == 1.0,
            "top_k": self.top_k in (0, -1),
            "min_p": self.min_p == 0.0,
            "presence_penalty": self.presence_penalty == 0.0,
            "frequency_penalty": self.frequency_penalty == 0.0,
            "repetition_penalty": self.repetition_penalty == 1.0,
            "logit_bias": not self.logit_bias,
        }
        for name, is_unused in unused.items():
            if not is_unused:
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r}: beam search goes by the model's own probabilities and draws "
                    "nothing; leave it out, or leave out beam_width",
                    param=name,
                )

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine computes side by side: beams or choices."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def is_greedy(self) -> bool:
        """True when no draw is needed."""
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0 or self.min_p == 1.0


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value!r}; it must be in [{low}, {high}]", param=name)
