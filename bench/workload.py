"""What is asked of every engine: cases, and prompts of an exact token count that no cache has seen. Pure.

Prompts are words that are one token each in the model's own vocabulary, so that a count in words is a count in tokens
for every engine; the servers' usage figures confirm it. A seed fixes every prompt, so all engines see the same ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CaseName = Literal["single", "conc16", "prefill", "shared", "mixed", "prefill8k", "decode8k"]
CASE_NAMES: tuple[CaseName, ...] = ("single", "conc16", "prefill", "shared", "mixed", "prefill8k", "decode8k")
LONG_CASES: tuple[CaseName, ...] = ("prefill8k", "decode8k")
"""Those that need the whole context of a model."""

NUM_CONCURRENT = 16
NUM_STREAMS = 8
"""Streams that run while a long prompt arrives."""
MAX_MODEL_LEN = 2560
"""Tokens of prompt and output of the largest request outside the long cases, with room to spare."""
LONG_MODEL_LEN = 8192
"""The same for the long cases."""

_WORD = re.compile(r"[a-z]{3,9}")
_SPACE = "Ġ"
"""How byte-level BPE vocabularies write a leading space."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion request: exactly `prompt_tokens` in, exactly `max_tokens` out."""

    prompt: str
    prompt_tokens: int
    max_tokens: int
    after_chunks: int = 0
    """Sent when all requests that were sent at once have got so many chunks of their answers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are sent at one instant. Unmeasured ones bring a cache into the state the case is about."""

    case: CaseName
    asks: tuple[Ask, ...]
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the cases, in tokens."""

    single_prompt: int = 128
    single_output: int = 128
    concurrent_output: int = 128
    prefill_prompt: int = 2048
    shared_prefix: int = 1024
    shared_tail: int = 32
    shared_output: int = 32
    stream_output: int = 96
    mixed_prompt: int = 2048
    long_prompt: int = 8000
    long_output: int = 64


FULL = Scale()
REDUCED = Scale(single_output=64, concurrent_output=64, shared_prefix=256, shared_output=16, stream_output=64)
"""For a larger model: the same kinds of work, less of it."""
WARM = Scale(single_output=16, concurrent_output=16, prefill_prompt=512)
"""For the unmeasured round of the cases in `WARMED`."""
WARMED: tuple[CaseName, ...] = ("single", "conc16", "prefill")
"""Cases with a round before: later ones meet a server that has computed all kinds of steps."""


def single_token_words(tokens: Sequence[str], limit: int = 1024) -> tuple[str, ...]:
    """Words that are one token both after a space and at the start of a text, in vocabulary order (frequent first).

    Raises:
        ValueError: fewer than 64 such words; the vocabulary is not a byte-level BPE of a language written so.
    """
    known = set(tokens)
    words = (token.removeprefix(_SPACE) for token in tokens if token.startswith(_SPACE))
    usable = [word for word in words if _WORD.fullmatch(word) and word in known][:limit]
    if len(usable) < 64:
        raise ValueError(f"the vocabulary has {len(usable)} plain one-token words; the benchmark needs 64")
    return tuple(usable)


def batches(case: CaseName, words: Sequence[str], seed: int, repeat: int, scale: Scale = FULL) -> tuple[Batch, ...]:
    """The batches of one repeat of a case. Equal arguments give equal text; another repeat shares no prefix with it."""
    rng = random.Random(f"{seed}/{case}/{repeat}")
    if case == "single":
        return (Batch(case, (_ask(rng, words, scale.single_prompt, scale.single_output),)),)
    if case == "prefill":
        return (Batch(case, (_ask(rng, words, scale.prefill_prompt, 1),)),)
    if case == "conc16":
        lengths = [64 + 8 * index for index in range(NUM_CONCURRENT)]
        rng.shuffle(lengths)
        return (Batch(case, tuple(_ask(rng, words, length, scale.concurrent_output) for length in lengths)),)
    if case == "mixed":
        return (_mixed(rng, words, scale),)
    if case in LONG_CASES:
        return _long(case, seed, repeat, words, scale)
    return _shared(rng, words, scale)


def _mixed(rng: random.Random, words: Sequence[str], scale: Scale) -> Batch:
    """Eight streams, and one long prompt that comes when all of them run."""
    streams = tuple(_ask(rng, words, 64, scale.stream_output) for _ in range(NUM_STREAMS))
    return Batch("mixed", (*streams, Ask(_text(rng, words, scale.mixed_prompt), scale.mixed_prompt, 1, after_chunks=8)))


def _long(case: CaseName, seed: int, repeat: int, words: Sequence[str], scale: Scale) -> tuple[Batch, ...]:
    """A prompt of nearly the whole context, or what comes after it: then it is in the cache already.

    All repeats of ``decode8k`` have the prompt of the first ``prefill8k``, so it has to be computed once at most.
    """
    known = case == "decode8k"
    text = _text(random.Random(f"{seed}/long/{0 if known else repeat}"), words, scale.long_prompt)
    if not known:
        return (Batch(case, (Ask(text, scale.long_prompt, 1),)),)
    prime = Batch(case, (Ask(text, scale.long_prompt, 1),), measured=False)
    measured = Batch(case, (Ask(text, scale.long_prompt, scale.long_output),))
    return (prime, measured) if repeat <= 0 else (measured,)


def _shared(rng: random.Random, words: Sequence[str], scale: Scale) -> tuple[Batch, ...]:
    """Sixteen requests put the prefix into every cache (and slot) an engine has; sixteen others then use it."""
    prefix = _text(rng, words, scale.shared_prefix)
    length = scale.shared_prefix + scale.shared_tail

    def with_tails(max_tokens: int) -> tuple[Ask, ...]:
        return tuple(
            Ask(f"{prefix} {_text(rng, words, scale.shared_tail)}", length, max_tokens) for _ in range(NUM_CONCURRENT)
        )

    return Batch("shared", with_tails(1), measured=False), Batch("shared", with_tails(scale.shared_output))


def _ask(rng: random.Random, words: Sequence[str], prompt_tokens: int, max_tokens: int) -> Ask:
    return Ask(_text(rng, words, prompt_tokens), prompt_tokens, max_tokens)


def _text(rng: random.Random, words: Sequence[str], num_words: int) -> str:
    return " ".join(rng.choices(words, k=num_words))
