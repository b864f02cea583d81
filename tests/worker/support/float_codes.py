"""8-bit floats (e4m3), spelt out: what each code stands for, and the nearest code of a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def _value(code: int) -> float:
    """Of an 8-bit float (e4m3)."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


FLOATS = np.array([_value(code) for code in range(256)])


def float_codes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The nearest 8-bit floats."""
    middles = (FLOATS[:126] + FLOATS[1:127]) / 2
    found: npt.NDArray[np.uint8] = np.searchsorted(middles, np.abs(values)).astype(np.uint8)
    return found | np.where(values < 0, np.uint8(128), np.uint8(0))
