"""Matchers for the requests of one model: each grammar is compiled once, and kept while others do not need its place.

Called by the server in the asyncio thread; the work is done in threads. Refusals are kept as well, so that a client who
sends the same broken schema again and again costs nothing. One that took too long is not kept: the machine may have
been busy.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from naru_proto.errors import InternalError, InvalidRequest
from naru_worker.adapters.engine.grammar_masks import MaskThread
from naru_worker.adapters.engine.grammar_matcher import GrammarMatcher
from naru_worker.adapters.engine.grammar_source import compile_matcher
from naru_worker.adapters.engine.grammar_threads import GrammarThreads
from naru_worker.adapters.engine.grammar_vocabulary import GrammarTokenizer, GrammarVocabulary
from naru_worker.core.request import PriorOutput
from naru_worker.core.structured import StructuredKind, StructuredOutput
from naru_worker.core.token_matcher import MatchState

MAX_KEPT = 128
"""Compiled grammars of one model. One takes some hundred kilobytes; large ones a few megabytes."""
COMPILE_LIMIT_S = 1.5
"""Of one grammar, on its own thread. The library's own limits end nearly all in less than half of it."""
BUILD_LIMIT_S = 60.0
"""Of a vocabulary, the first time that a model is asked for structured output."""
MOST_PRIOR_INLINE = 32
"""So few tokens of prior output are taken at once; more are taken in a thread."""
MOST_COPIES_INLINE = 8
"""So few matchers are made at once; that of a large grammar takes two milliseconds."""

_Key = tuple[StructuredKind, tuple[str, ...]]


@dataclass(slots=True)
class GrammarRoom:
    """What all models of a worker share. A vocabulary lives as long as a model that uses it."""

    threads: GrammarThreads = field(default_factory=GrammarThreads)
    masks: MaskThread = field(default_factory=MaskThread)
    vocabularies: weakref.WeakValueDictionary[tuple[int, int, tuple[int, ...]], GrammarVocabulary] = field(
        default_factory=weakref.WeakValueDictionary
    )


class GrammarCompiler:
    """One model's grammars. Asyncio thread only."""

    def __init__(
        self,
        room: GrammarRoom,
        tokenizer: GrammarTokenizer,
        vocab_limit: int,
        eos_token_ids: tuple[int, ...],
        *,
        max_kept: int = MAX_KEPT,
        limit_s: float | None = None,
    ) -> None:
        """`vocab_limit`: ids at or above it are never drawn. `limit_s`: of one compilation; None: `COMPILE_LIMIT_S`."""
        self.num_compiled = 0
        """Compilations begun so far."""
        self._room = room
        self._tokenizer = tokenizer
        self._vocab_limit = vocab_limit
        self._eos_token_ids = eos_token_ids
        self._max_kept = max_kept
        self._limit_s = COMPILE_LIMIT_S if limit_s is None else limit_s
        self._kept: OrderedDict[_Key, asyncio.Task[LLMatcher]] = OrderedDict()
        self._vocabulary: asyncio.Task[GrammarVocabulary] | None = None

    async def matchers(
        self, wish: StructuredOutput, num_choices: int, prior: Sequence[PriorOutput] = ()
    ) -> tuple[GrammarMatcher, ...]:
        """A matcher for each choice, moved past its prior output.

        Raises:
            InvalidRequest: the wish cannot be kept, or prior output does not match it.
            Overloaded: too many others are being compiled.
        """
        first = await self._compiled(wish)
        num_words = (await self._ready_vocabulary()).mask_words

        def make() -> tuple[GrammarMatcher, ...]:
            made = tuple(GrammarMatcher(first.deep_copy(), num_words, wish.param) for _ in range(num_choices))
            for matcher, each in zip(made, prior, strict=False):
                take_prior(matcher, each)
            return made

        num_prior_tokens = sum(len(each.token_ids) for each in prior)
        if num_choices <= MOST_COPIES_INLINE and num_prior_tokens <= MOST_PRIOR_INLINE:
            return make()
        return await asyncio.to_thread(make)

    async def _compiled(self, wish: StructuredOutput) -> LLMatcher:
        key = (wish.kind, wish.texts)
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.create_task(self._compile(wish))
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        try:
            # Whoever leaves must not take it away from the others who wait for it.
            return await asyncio.shield(task)
        except InvalidRequest as exc:
            raise InvalidRequest(exc.message, param=wish.param) from exc
        except BaseException:
            if task.done() and self._kept.get(key) is task:
                del self._kept[key]
            raise

    async def _compile(self, wish: StructuredOutput) -> LLMatcher:
        vocabulary = await self._ready_vocabulary()
        self.num_compiled += 1
        try:
            return await self._room.threads.run(lambda: compile_matcher(vocabulary, wish), self._limit_s)
        except TimeoutError as exc:
            self._kept.pop((wish.kind, wish.texts), None)
            raise InvalidRequest(
                f"the {wish.kind.value} takes more than {self._limit_s:g} s to compile; make it simpler",
                param=wish.param,
            ) from exc

    async def _ready_vocabulary(self) -> GrammarVocabulary:
        if self._vocabulary is None or (self._vocabulary.done() and self._vocabulary.exception() is not None):
            self._vocabulary = asyncio.create_task(self._build())
        return await asyncio.shield(self._vocabulary)

    async def _build(self) -> GrammarVocabulary:
        # The number of a tokenizer is its own while the vocabulary that holds it lives.
        key = (id(self._tokenizer), self._vocab_limit, self._eos_token_ids)
        known = self._room.vocabularies.get(key)
        if known is not None:
            return known
        try:
            built = await self._room.threads.run(
                lambda: GrammarVocabulary(self._tokenizer, self._vocab_limit, self._eos_token_ids), BUILD_LIMIT_S
            )
        except TimeoutError as exc:
            raise InternalError("the model's vocabulary could not be made ready for structured output") from exc
        self._room.vocabularies[key] = built
        return built


def take_prior(matcher: GrammarMatcher, prior: PriorOutput) -> None:
    """Moves a fresh matcher past what its choice has said.

    Raises:
        InvalidRequest: that does not match.
    """
    if prior.is_finished:
        return  # nothing is asked of it any more
    for token_id in prior.token_ids:
        if matcher.advance(token_id) is MatchState.FAILED:
            raise InvalidRequest(
                f"prior does not match what is asked for by {matcher.param}: {matcher.failure}", param="prior"
            )
