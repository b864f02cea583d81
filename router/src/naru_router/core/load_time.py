"""How long a model's load has yet to take, and what follows for those who wait: pure.

Asked by whoever refuses a request, and before one waits. The worker's own word about a load under way comes first; else
what the last load of the model took anywhere, less the time since this one began.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from naru_proto.registry import FootprintRecord

TOLD_MARGIN = 1.1
"""A worker's own estimate knows its disk, its network and how far the load is."""
MEASURED_MARGIN = 1.25
"""The last load was perhaps another worker's, with nothing else to do."""
OVERRUN = 0.1
"""A load that has taken longer than expected: about this share of it more, until it is there."""
MIN_LEFT_S = 1.0
"""Nobody is told to come back sooner: the client's own clock and way cost that much."""
HOPELESS_FACTOR = 1.5
HOPELESS_S = 2.0
"""Estimates err: only a load that is to take so much longer than a request may wait refuses it at once."""


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Of one load."""

    left_s: float = 0.0
    """Expected, without a margin; 0: not known."""
    is_told: bool = False
    """A worker's own word about a load that is under way."""

    @property
    def retry_after_s(self) -> float:
        """When it is worth to ask again; 0: not known."""
        if not self.left_s > 0:
            return 0.0
        return max(MIN_LEFT_S, self.left_s * (TOLD_MARGIN if self.is_told else MEASURED_MARGIN))

    def is_hopeless(self, rest_s: float) -> bool:
        """Whether a request that may wait `rest_s` more would wait in vain, by the worker's own word.

        The client gains by being told at once: it can go elsewhere, or come back when the load, which goes on, is done.
        """
        return self.is_told and self.left_s > rest_s * HOPELESS_FACTOR + HOPELESS_S


UNKNOWN = TimeLeft()


def time_left(
    told_s: float, told_age_s: float, footprint: FootprintRecord | None, *, is_near: bool, elapsed_s: float
) -> TimeLeft:
    """What is left of a load.

    Args:
        told_s: the worker's word; 0: none.
        told_age_s: how old that is.
        footprint: of the model; None: never loaded.
        is_near: the files are on the worker, so that nothing has to be fetched.
        elapsed_s: since the load began; 0: it is about to.
    """
    if 0 < told_s < math.inf:
        return TimeLeft(_rest(told_s, max(0.0, told_age_s)), is_told=True)
    if footprint is None:
        return UNKNOWN
    expected_s = footprint.load_s if is_near or not footprint.fetch_s > 0 else footprint.fetch_s
    if not 0 < expected_s < math.inf:
        return UNKNOWN
    return TimeLeft(_rest(expected_s, max(0.0, elapsed_s)))


def _rest(expected_s: float, elapsed_s: float) -> float:
    if elapsed_s < expected_s:
        return max(expected_s - elapsed_s, OVERRUN * expected_s)
    return OVERRUN * elapsed_s
