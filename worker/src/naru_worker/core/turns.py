"""Which of many models' engines steps next: deficit round robin on compute time, weighted by queue age.

Called by the engine loop between steps, with the engines that have work at that instant. It knows no clock: the seconds
that a step took are told afterwards, so an engine may overdraw by one step and then waits until it is even again. With
one engine at work nothing is counted but one sum.

Source: M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round-Robin", IEEE/ACM Transactions on
Networking 4(3), 1996; paying after service instead of before it, as the length of a step is not known before it is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

QUANTUM_S = 0.005
"""Compute time of one round at weight 1: about one decode step of a small model, so that turns change often."""
MAX_WEIGHT = 2.0
FULL_AGE_S = 1.0
"""A request that has waited this long gives its engine the full weight."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with work, at one instant."""

    engine_id: int
    queue_age_s: float = 0.0
    """Age of its oldest waiting request; 0: none waits."""


def turn_weight(queue_age_s: float) -> float:
    """Share of compute time relative to an engine where nobody waits, in [1, MAX_WEIGHT]."""
    return 1.0 + (MAX_WEIGHT - 1.0) * min(max(queue_age_s, 0.0) / FULL_AGE_S, 1.0)


class Turns:
    """Balances of compute time, by engine: positive is what it may still use in this round, negative is owed."""

    def __init__(self, quantum_s: float = QUANTUM_S) -> None:
        if not quantum_s > 0.0:
            raise ValueError(f"quantum_s is {quantum_s!r}; it must be above 0")
        self._quantum_s = quantum_s
        self._balances: dict[int, float] = {}
        self._last = -1
        self._is_alone = False
        self._alone_s = 0.0
        """Compute time that only one engine wanted, since somebody else last did."""

    def choose(self, contenders: Sequence[Contender]) -> int:
        """Id of the engine that steps now. There must be at least one; ids ascend, and are at least 0."""
        assert contenders, "somebody must have work"
        if len(contenders) == 1:
            self.choose_only(contenders[0].engine_id)
            return self._last
        self._is_alone = False
        balances = self._balances
        ids = [contender.engine_id for contender in contenders]
        self._settle(ids)
        if balances.get(self._last, 0.0) <= 0.0:
            while not any(balances[engine_id] > 0.0 for engine_id in ids):
                self._begin_rounds(contenders)
            after = [engine_id for engine_id in ids if engine_id > self._last]
            before = [engine_id for engine_id in ids if engine_id <= self._last]
            self._last = next(engine_id for engine_id in after + before if balances[engine_id] > 0.0)
        return self._last

    def choose_only(self, engine_id: int) -> None:
        """The same where only one engine has work."""
        self._is_alone = True
        self._last = engine_id

    def charge(self, engine_id: int, step_s: float) -> None:
        """Books the seconds of a step of the engine chosen last."""
        if self._is_alone:
            self._alone_s += step_s
        else:
            self._balances[engine_id] = self._balances.get(engine_id, 0.0) - step_s

    def forget(self, engine_id: int) -> None:
        """The engine is gone."""
        self._balances.pop(engine_id, None)

    def _settle(self, ids: list[int]) -> None:
        """Before a choice among several: who has no work keeps no credit; time nobody else wanted pays debts."""
        balances = self._balances
        working = set(ids)
        for engine_id, balance_s in balances.items():
            if balance_s < 0.0:
                balances[engine_id] = min(0.0, balance_s + self._alone_s)
            elif engine_id not in working:
                balances[engine_id] = 0.0
        self._alone_s = 0.0
        for engine_id in ids:
            balances.setdefault(engine_id, 0.0)

    def _begin_rounds(self, contenders: Sequence[Contender]) -> None:
        """As many rounds at once as it takes until somebody may step."""
        balances = self._balances
        quanta = {c.engine_id: self._quantum_s * turn_weight(c.queue_age_s) for c in contenders}
        num_rounds = min(math.floor(-balances[engine_id] / quantum_s) + 1 for engine_id, quantum_s in quanta.items())
        for engine_id, balance_s in balances.items():
            if engine_id in quanta:
                balances[engine_id] = balance_s + num_rounds * quanta[engine_id]
            else:
                # An engine that comes and goes does not escape what it owes by being away, and saves nothing.
                balances[engine_id] = min(0.0, balance_s + num_rounds * self._quantum_s)
