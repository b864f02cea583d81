"""How many requests of a batch are in flight at once: as many as may be, fewer while workers or quotas refuse. Pure.

Additive increase, multiplicative decrease: a refusal takes the limit down by a third, once in a while whatever the
number of refusals, as those of one moment have one reason; each answer brings it up by a share of one.
"""

from __future__ import annotations

DECREASE = 0.66
DECREASE_EVERY_S = 1.0
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0


class Pace:
    """Of one batch. Mutable."""

    def __init__(self) -> None:
        self._limit = 0.0
        self._most = 0
        self._until_s = 0.0

    def limit(self, most: int) -> int:
        """Requests that may be in flight now; `most`: however well it goes."""
        if most != self._most:
            self._limit = float(most) if self._limit >= self._most else min(self._limit, float(most))
            self._most = most
        return max(1, int(self._limit))

    def answered(self) -> None:
        """A request was served."""
        self._limit = min(float(self._most), self._limit + 1.0 / max(1.0, self._limit))

    def refused(self, now_s: float) -> None:
        """A request was told to come again later."""
        if now_s >= self._until_s:
            self._until_s = now_s + DECREASE_EVERY_S
            self._limit = max(1.0, self._limit * DECREASE)


def pause_s(num_tries: int, retry_after_s: float, spread: float) -> float:
    """Seconds before a refused request is sent again; `spread` in [0, 1): so that they do not come all at once."""
    grown = min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0 ** min(num_tries, 16))
    return min(MAX_PAUSE_S, max(grown if num_tries else MIN_PAUSE_S, retry_after_s)) * (0.75 + 0.5 * spread)
