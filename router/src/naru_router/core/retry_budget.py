"""How many retries a router may make for one model: a share of its requests, and a few beside them.

Where every worker refuses, retries only multiply the load that they refuse. The dispatcher asks before each retry that
`core.retry` wants paid for, and tells of requests, retries and refusals that met a refusal again. Time is passed in.

Over any window: retries <= share × requests of that window + floor. Counted in slices of the window, so the budget
follows the rate of requests in both directions, and a second's worth of a window's ten is there at once for a worker
that turns all its requests away when it leaves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Of one model in one router."""

    share: float = 0.1
    floor: int = 10
    """Retries in a window that are there without any request: a quiet fleet may lose a worker as well."""
    window_s: float = 10.0
    busy_pause_s: float = 1.0
    """For so long after a second worker refused, too, no refusal is tried elsewhere."""


DEFAULTS = BudgetSettings()
_NUM_SLICES = 10


class RetryBudget:
    """Mutable."""

    def __init__(self, settings: BudgetSettings = DEFAULTS) -> None:
        self._settings = settings
        self._slices: deque[list[float]] = deque()
        """[number of its slice, requests, retries]; oldest first."""
        self._num_requests = 0.0
        self._num_retries = 0.0
        self._busy_until_s = float("-inf")

    def on_request(self, now_s: float) -> None:
        """A client's request has come."""
        self._slice(now_s)[1] += 1
        self._num_requests += 1

    def allows(self, now_s: float, *, is_refusal: bool = False) -> bool:
        """Whether one more retry is within the budget.

        Args:
            now_s: of any clock that does not go back.
            is_refusal: a busy worker refused, and the others may be as busy.
        """
        if is_refusal and now_s < self._busy_until_s:
            return False
        self._slice(now_s)
        settings = self._settings
        return self._num_retries + 1 <= settings.share * self._num_requests + settings.floor

    def spend(self, now_s: float) -> None:
        """One retry is made."""
        self._slice(now_s)[2] += 1
        self._num_retries += 1

    def refused_again(self, now_s: float) -> None:
        """A request that one worker refused was refused by another one as well: all are busy, most likely."""
        self._busy_until_s = now_s + self._settings.busy_pause_s

    def _slice(self, now_s: float) -> list[float]:
        """The slice of this instant; those that have left the window are forgotten."""
        number = now_s // (self._settings.window_s / _NUM_SLICES)
        while self._slices and self._slices[0][0] <= number - _NUM_SLICES:
            _, num_requests, num_retries = self._slices.popleft()
            self._num_requests -= num_requests
            self._num_retries -= num_retries
        if not self._slices or self._slices[-1][0] < number:
            self._slices.append([number, 0.0, 0.0])
        return self._slices[-1]
