"""Finds stop strings in a text that comes in pieces, and holds back only what may still become one.

Used by the output stream. The result depends on the characters alone, never on how they were cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)  # one for each token: frozen ones take twice as long to make
class StopMatch:
    """Text that is certain, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """The stop strings of one request, prepared once and shared by its sequences. Immutable.

    Source: prefix function of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
    """

    __slots__ = ("fallbacks", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        if not all(self.stops):
            raise ValueError("a stop string is empty; it would match everywhere")
        self.fallbacks = tuple(_fallbacks(stop) for stop in self.stops)


class StopMatcher:
    """Scans one sequence's text.

    The match that is complete first wins; of several complete at the same character, the longest. Holds back the
    longest tail that is the start of a stop string: less than the longest of them. Work is O(characters x stops).
    """

    __slots__ = ("_held", "_matched", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        self._matched = [0] * len(stops.stops)
        """Per stop string: how many of its characters the text ends with."""

    def feed(self, text: str, *, obeys: bool = True) -> StopMatch:
        """Takes more text and gives what is certain. `obeys` False: a stop completed by this text is no stop.

        After a match the matcher is spent: nothing that follows may be fed.
        """
        if not self._matched or not text:
            return StopMatch(text)
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None and obeys:
                self._held = ""
                return StopMatch(buffer[: end - len(stop)], stop)
        num_certain = len(buffer) - max(self._matched)
        self._held = buffer[num_certain:]
        return StopMatch(buffer[:num_certain])

    def fork(self) -> StopMatcher:
        """One that has read what this one has, and goes on by itself."""
        other = StopMatcher(self._stops)
        other._held = self._held
        other._matched = self._matched.copy()
        return other

    def finish(self) -> str:
        """The text held back: the end has come, and it is no stop."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Moves every stop on by one character; the longest that is now complete."""
        found: str | None = None
        for index, stop in enumerate(self._stops.stops):
            matched = self._matched[index]
            fallbacks = self._stops.fallbacks[index]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                matched = fallbacks[matched - 1]
            self._matched[index] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """Item i: length of the longest proper prefix of ``stop[: i + 1]`` that is also its suffix."""
    lengths = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[index] != stop[matched]:
            matched = lengths[matched - 1]
        if stop[index] == stop[matched]:
            matched += 1
        lengths[index] = matched
    return lengths
