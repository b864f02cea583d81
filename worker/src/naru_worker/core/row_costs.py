"""What a step of generated tokens takes by its number of rows: a line through what was measured, which forgets.

Fed by the engine after each step that computes generated tokens only; the choice of drafts reads it. Before different
numbers of rows were seen, a row is taken to cost what it costs on a machine that reads weights about as fast as it
multiplies by them.

Source: least squares with exponential forgetting; the slope is pulled towards the expected one (ridge regression, Hoerl
and Kennard, Technometrics 12, 1970).
"""

from __future__ import annotations

HALF_LIFE_STEPS = 64.0
EXPECTED_SLOPE = 0.3
"""Of a step of one row, for each row more: rather too much, so that measuring it costs little."""
MAX_DEVIATION = 3.0
"""A step that took longer than so many times what was expected is taken for one that took that: somebody disturbed."""
_PULL = 8.0
"""How much the expected slope counts: as so many steps that lie one row apart from the mean."""
_MIN_STEPS = 8.0
"""Before a step may be called disturbed."""


class RowCosts:
    """Mutable; seconds. Only ratios matter to those who choose."""

    __slots__ = ("_base", "_count", "_kept", "_slope", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._kept = 0.5 ** (1.0 / HALF_LIFE_STEPS)
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self._base, self._slope = 1.0 - EXPECTED_SLOPE, EXPECTED_SLOPE

    def step_s(self, num_rows: int) -> float:
        """Expected seconds of a step with so many rows; without any measurement, in units of a step with one."""
        return self._base + self._slope * num_rows

    @property
    def row_s(self) -> float:
        """Expected seconds of a row more."""
        return self._slope

    def observe(self, num_rows: int, step_s: float) -> None:
        """One step of generated tokens; one without rows or time is no sample."""
        if num_rows < 1 or step_s <= 0.0:
            return
        if self._count >= _MIN_STEPS:
            step_s = min(step_s, MAX_DEVIATION * self.step_s(num_rows))
        kept = self._kept
        self._count = self._count * kept + 1.0
        self._x = self._x * kept + num_rows
        self._y = self._y * kept + step_s
        self._xx = self._xx * kept + num_rows * num_rows
        self._xy = self._xy * kept + num_rows * step_s
        self._fit()

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._count, self._y / self._count
        spread = max(0.0, self._xx - self._x * mean_x)
        together = self._xy - self._x * mean_y
        expected = EXPECTED_SLOPE * mean_y / (1.0 + EXPECTED_SLOPE * (mean_x - 1.0))
        slope = (together + _PULL * expected) / (spread + _PULL)
        # A row costs something, and no row costs more than a step without it.
        self._slope = min(max(slope, 0.01 * mean_y / mean_x), mean_y / mean_x)
        self._base = mean_y - self._slope * mean_x
