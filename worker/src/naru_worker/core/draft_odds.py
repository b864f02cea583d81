"""How often a guessed token is the one that is drawn, by how many tokens before it had matched.

Used by draft sources. It is measured at every step, whether or not the guess was computed, so that nothing need be
spent on finding out: what was guessed for the next token is compared with what was drawn.
"""

from __future__ import annotations

from naru_worker.core.ngram_index import MIN_MATCH

MAX_LENGTH = 12
"""Longer matches are counted with those of this length."""
_PRIOR_WEIGHT = 4.0
"""Guesses that what was known before counts for."""


class DraftOdds:
    """Shares of right guesses, which forget. Mutable.

    Those of a sequence start from those of its model, and these from what is usual for text: short matches are often
    chance.
    """

    __slots__ = ("_hits", "_kept", "_model", "_trials")

    def __init__(self, half_life_guesses: float, model: DraftOdds | None = None) -> None:
        """`half_life_guesses`: after so many guesses of one length, older ones count half. `model`: where to start."""
        self._kept = 0.5 ** (1.0 / half_life_guesses)
        self._model = model
        self._hits = [0.0] * (MAX_LENGTH + 1)
        self._trials = [0.0] * (MAX_LENGTH + 1)

    def observe(self, length: int, *, is_hit: bool) -> None:
        """A guess after a match of this length was right or not; the model's odds learn from it, too."""
        place = min(length, MAX_LENGTH)
        self._hits[place] = self._hits[place] * self._kept + is_hit
        self._trials[place] = self._trials[place] * self._kept + 1.0
        if self._model is not None:
            self._model.observe(length, is_hit=is_hit)

    def of(self, length: int) -> float:
        """Probability in (0, 1) that a guess after a match of this length is right."""
        place = min(length, MAX_LENGTH)
        known = length_prior(place) if self._model is None else self._model.of(place)
        return (self._hits[place] + _PRIOR_WEIGHT * known) / (self._trials[place] + _PRIOR_WEIGHT)


def length_prior(length: int) -> float:
    """What is believed before anything was measured, in (0, 1)."""
    return length / (length + 3.0 * MIN_MATCH)
