"""Order statistics and ratios over measured values. Pure; called by the report and the measuring code."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` (0 to 100) of the values lie, linearly interpolated between neighbours.

    Raises:
        ValueError: no values, or a percentage outside [0, 100].
    """
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent!r}, expected 0 to 100")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle value. Raises ValueError for none."""
    return percentile(values, 50)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where a side is missing or the denominator is not positive: a ratio is never made up."""
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def best(values: Sequence[float | None], *, lowest: bool = False) -> float | None:
    """The largest value (the smallest with `lowest`), or None as soon as one is missing or there are none."""
    present = [value for value in values if value is not None]
    if not present or len(present) != len(values):
        return None
    return min(present) if lowest else max(present)
