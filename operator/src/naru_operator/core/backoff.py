"""How long to wait before a process that ended is started again. Called by the supervisor."""

from __future__ import annotations

_FIRST_S = 0.25
_MAX_S = 30.0
_STABLE_S = 30.0
"""A process that ran this long was healthy: its next failure counts as the first."""


def count_failures(num_failures: int, uptime_s: float) -> int:
    """Failures in a row, this one included."""
    return 1 if uptime_s >= _STABLE_S else num_failures + 1


def restart_delay_s(num_failures: int) -> float:
    """Doubles from a quarter of a second to half a minute."""
    return float(min(_MAX_S, _FIRST_S * 2 ** min(max(num_failures, 1) - 1, 16)))
