"""When work that comes round again is due: what a process does every so often falls on the same instants.

Waking up is dear, whatever is done then: memory is cold, a core sleeps. So the rounds of a process share their wakes.
Pure but for the process's own phase: those of one machine do not all wake at once.
"""

from __future__ import annotations

import os

_GOLDEN = 0.6180339887498949
PHASE_S = os.getpid() * _GOLDEN % 1.0
"""Of this process's beats."""
_MIN_SHARE = 0.1
"""Timers may go off a moment early: a beat that is nearer than this share of the interval counts as reached."""


def until_beat_s(now_s: float, interval_s: float) -> float:
    """Seconds to the next beat of an interval above 0, at most 1.1 times the interval.

    Args:
        now_s: on the event loop's clock.
        interval_s: between two beats; those of an interval are among the beats of its whole divisors.
    """
    left_s = interval_s - (now_s - PHASE_S) % interval_s
    return left_s if left_s >= _MIN_SHARE * interval_s else left_s + interval_s
