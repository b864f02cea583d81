"""How many guessed tokens each sequence of a step computes beside its next one: as many as pay.

Pure: odds and costs in, numbers and a reason out. A step of s sequences gives s tokens, and for each guess the
probability of its being right more; it takes longer with every row. What counts is tokens a second, of all together.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass

from naru_worker.core.row_costs import RowCosts

MIN_GAIN = 1.06
"""Drafts must promise so many times the tokens a second: odds and costs are estimates."""


class DraftReason(enum.Enum):
    """Why a step has the drafts it has."""

    PAYS = "pays"
    """Some sequences have drafts."""
    NO_MATCH = "no_match"
    """No text repeats itself."""
    POOR_ODDS = "poor_odds"
    """Guesses were wrong too often for what a row costs."""
    LARGE_BATCH = "large_batch"
    """Too many sequences for guesses to be worth looking for."""
    NO_ROOM = "no_room"
    """Neither tokens of the step's budget nor blocks are left over."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """How many drafts each sequence gets, in the order of the odds given, and why."""

    num_drafts: tuple[int, ...]
    reason: DraftReason


def least_chance(num_rows: int, num_sequences: int, costs: RowCosts) -> float:
    """A guess that is right less often than this costs more than it gives, whatever else is chosen."""
    return num_sequences * costs.row_s / costs.step_s(num_rows)


def choose_drafts(
    odds: Items[Items[float]], num_rows: int, num_sequences: int, costs: RowCosts, max_rows: int
) -> DraftChoice:
    """The numbers of drafts that give most tokens a second.

    Args:
        odds: of each sequence that has guesses, the probability that its first one, two, ... are right: falling. Those
            below `least_chance` may be left out.
        num_rows: rows of generated tokens without drafts.
        num_sequences: sequences that gain a token without drafts, at least one.
        costs: what a step takes by its rows.
        max_rows: most rows to add.
    """
    counts = [0] * len(odds)
    none = tuple(counts)
    if not odds:
        return DraftChoice(none, DraftReason.NO_MATCH)
    if max_rows <= 0:
        return DraftChoice(none, DraftReason.NO_ROOM)
    ranked = sorted(((-chance, at) for at, chances in enumerate(odds) for chance in chances[:max_rows]))
    best_rate = MIN_GAIN * num_sequences / costs.step_s(num_rows)
    best_count = 0
    last_rate = 0.0
    tokens = float(num_sequences)
    for count, (negative_chance, _) in enumerate(ranked[:max_rows], start=1):
        tokens -= negative_chance
        rate = tokens / costs.step_s(num_rows + count)
        if rate < last_rate:
            break  # chances fall and costs rise by a line: from here on it only falls
        last_rate = rate
        if rate > best_rate:
            best_rate, best_count = rate, count
    if best_count == 0:
        return DraftChoice(none, DraftReason.POOR_ODDS)
    for _, at in ranked[:best_count]:
        counts[at] += 1
    return DraftChoice(tuple(counts), DraftReason.PAYS)
