"""Says how far a run is and how long the rest may take, from how long the same steps took in an earlier run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

UNKNOWN_S = 15.0
"""Of a step that no earlier run has."""


@dataclass
class Progress:
    """Steps in the order they are done, each known by a key: ``suite/engine/settings/what``, or a shorter one."""

    steps: Sequence[str]
    earlier_s: Mapping[str, float]
    """How long steps took before."""
    clock: Callable[[], float]
    say: Callable[[str], None]
    took_s: dict[str, float] = field(default_factory=dict)
    _current: str = ""
    _since_s: float = 0.0

    def begin(self, key: str) -> None:
        """Ends the current step and begins this one."""
        self.end()
        self._current, self._since_s = key, self.clock()

    def end(self) -> None:
        """Ends the current step, if there is one."""
        if self._current:
            self.took_s[self._current] = self.took_s.get(self._current, 0.0) + self.clock() - self._since_s
        self._current = ""

    def expected_s(self, key: str) -> float:
        """How long a step took before; one that never ran, as long as the same in the engine's other settings did."""
        if key in self.earlier_s:
            return self.earlier_s[key]
        like = [seconds for known, seconds in self.earlier_s.items() if _same_but_settings(known, key)]
        return sum(like) / len(like) if like else UNKNOWN_S

    def remaining_s(self) -> float:
        """An estimate: of steps not begun, and of what is left of the current one."""
        waiting = [key for key in self.steps if key not in self.took_s and key != self._current]
        rest = sum(self.expected_s(key) for key in waiting)
        if self._current:
            rest += max(0.0, self.expected_s(self._current) - (self.clock() - self._since_s))
        return rest

    def tell(self, text: str) -> None:
        """The text, and how long the rest may take."""
        minutes, seconds = divmod(round(self.remaining_s()), 60)
        self.say(f"{text} (about {minutes}:{seconds:02d} min left)")


def _same_but_settings(one: str, other: str) -> bool:
    parts, others = one.split("/"), other.split("/")
    return len(parts) > 2 and len(others) > 2 and parts[:2] == others[:2] and parts[-1] == others[-1]
