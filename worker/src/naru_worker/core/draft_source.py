"""Guesses what a sequence says next from what it said or was given before: the text that followed its last tokens then.

One for each sequence that generates, kept up step by step. A match that goes on is followed without a new search.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from naru_worker.core.draft_odds import DraftOdds
from naru_worker.core.ngram_index import NgramIndex

_HALF_LIFE_GUESSES = 16.0
"""Of one sequence's odds: texts change between copying and telling."""


class DraftSource:
    """One sequence's. Mutable; reads its tokens, which only grow."""

    __slots__ = ("_index", "_length", "_num_seen", "_odds", "_place")

    def __init__(self, model_odds: DraftOdds) -> None:
        self._index = NgramIndex()
        self._odds = DraftOdds(_HALF_LIFE_GUESSES, model_odds)
        self._place = 0
        """Where the token stands that should come next; 0: no match."""
        self._length = 0
        self._num_seen = 0

    def catch_up(self, token_ids: Items[int]) -> bool:
        """Takes up new tokens, counts the guesses that they tell right or wrong, and says whether there is one now."""
        num_tokens = len(token_ids)
        place = self._place
        if place:
            for index in range(self._num_seen, num_tokens):
                is_hit = token_ids[place] == token_ids[index]
                self._odds.observe(self._length, is_hit=is_hit)
                if not is_hit:
                    place = 0
                    break
                place += 1
                self._length += 1
        self._num_seen = num_tokens
        self._index.extend(token_ids)
        if not place:
            place, self._length = self._index.find(token_ids)
        self._place = place
        return place > 0

    def odds(self, num_tokens: int, least: float) -> list[float]:
        """Item i: probability that the next i + 1 tokens are all as guessed. Falls; `num_tokens` items at most.

        What is below `least` is left out.
        """
        odds, length = self._odds, self._length
        chances: list[float] = []
        chance = 1.0
        for ahead in range(num_tokens):
            chance *= odds.of(length + ahead)
            if chance < least:
                break
            chances.append(chance)
        return chances

    def drafts(self, token_ids: Items[int], num_tokens: int) -> tuple[int, ...]:
        """The next tokens as guessed; a text that repeats itself goes on doing so. Only while there is a guess."""
        place = self._place
        known = tuple(token_ids[place : place + num_tokens])
        if len(known) < num_tokens:
            period = len(token_ids) - place
            return tuple(token_ids[place + index % period] for index in range(num_tokens))
        return known
