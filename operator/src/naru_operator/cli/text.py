"""Tables and amounts as text, for the commands that print what is. Knows nothing of what it prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MAX_PRECISE = 9.95
"""Below this one decimal says something."""


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns two blanks apart, the last one open."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join(lines)


def human_bytes(num_bytes: int) -> str:
    """An amount in the largest binary unit that leaves at least 1 of it."""
    amount, unit = float(max(0, num_bytes)), 0
    while amount >= 1023.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit and amount < _MAX_PRECISE else f"{amount:.0f} {_UNITS[unit]}"


def listed(names: Iterable[str], max_shown: int) -> str:
    """Names in their order, cut with a count where they are many; a dash where there is none."""
    names = list(names)
    more = len(names) - max_shown
    return ", ".join(names[:max_shown]) + (f" and {more} more" if more > 0 else "") or "-"
