"""Structured requests over the toy model: matchers made at once, without the server's threads."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from toy_model import EOS, NUM_TOKENS, ToyTokenizer

from naru_worker.adapters.engine.grammar_compiler import take_prior
from naru_worker.adapters.engine.grammar_matcher import GrammarMatcher
from naru_worker.adapters.engine.grammar_source import compile_matcher
from naru_worker.adapters.engine.grammar_vocabulary import GrammarVocabulary
from naru_worker.core.request import PriorOutput, Request, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.structured import StructuredKind, StructuredOutput

_arrivals = itertools.count()


@functools.cache
def toy_vocabulary() -> GrammarVocabulary:
    """The toy tokenizer's."""
    return GrammarVocabulary(ToyTokenizer(), NUM_TOKENS, (EOS,))


def wish_of(kind: str, *texts: str) -> StructuredOutput:
    """By the name of its kind."""
    return StructuredOutput(StructuredKind(kind), texts)


def structured(
    name: str,
    wish: StructuredOutput,
    prompt: str = "once upon",
    *,
    prior: tuple[PriorOutput, ...] = (),
    show_special_tokens: bool = False,
    **params: Any,
) -> Request:
    """A request whose text has to be what `wish` says."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "structured": wish, **params}
    sampling = SamplingParams(**given)
    first = compile_matcher(toy_vocabulary(), wish)
    matchers = tuple(
        GrammarMatcher(first.deep_copy(), toy_vocabulary().mask_words, wish.param) for _ in range(sampling.n)
    )
    for matcher, each in zip(matchers, prior, strict=False):
        take_prior(matcher, each)
    return Request(
        RequestId(name),
        tuple(prompt.encode()),
        sampling,
        sampling.seed if sampling.seed is not None else 5,
        next(_arrivals) + 10_000,
        prior=prior,
        matchers=matchers,
        show_special_tokens=show_special_tokens,
    )
