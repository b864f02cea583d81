"""What rendering one chat template may cost: processor time, steps, and the size of every value it makes or sees.

Templates come with model files and are not trusted. A thread cannot be stopped from outside, so the template stops
itself: the sandbox calls `step` at each loop turn, call, filter and operator, and `weigh` on each value. No single
operation may touch more than `max_chars`, so between two steps little time can pass.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import cast

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace

NODE_CHARS = 16
"""What a list entry, number or key weighs, in characters of text."""
MAX_INTEGER_BITS = 1024
"""Larger integers are no text of a chat, and arithmetic on them takes time that no step sees."""
LOOK_STEPS, LOOK_CHARS = 64, 64 * 1024
"""The clock is asked after so many steps or characters: one question costs more than one step."""
TOTAL_FACTOR = 4
"""All texts of one rendering together may be this many times `max_chars`: templates strip and join what they print."""


class BudgetExceeded(TemplateRuntimeError):
    """The template has used up its budget."""


class Budget:
    """Counts for one rendering. Made and used by one thread, whose processor time it counts: a busy machine is no fault
    of the template's.
    """

    def __init__(self, *, max_steps: int, max_chars: int, timeout_s: float) -> None:
        self._steps_left = self._max_steps = max_steps
        self._max_chars = max_chars
        self._chars_left = max_chars * TOTAL_FACTOR
        self._timeout_s = timeout_s
        self._wall_deadline_s = time.perf_counter() + timeout_s / 2
        """Up to here no more processor time than clock time has passed, whatever else the machine does."""
        self._deadline_s: float | None = None
        """From there on, in processor time of this thread, which is dear to ask for."""
        self._look_at = max_steps - LOOK_STEPS
        """So many steps left: time to look at the clock."""
        self._look_at_chars = self._chars_left - LOOK_CHARS
        self._known: dict[int, int] = {}

    def know(self, value: object) -> int:
        """Weighs an input once, whatever its size. It must not change, and must live as long as the rendering."""
        if isinstance(value, str):
            return len(value) + NODE_CHARS
        if not isinstance(value, (list, dict)):
            return self._weigh(value, None)
        total = NODE_CHARS
        for child in value if isinstance(value, list) else (*value.keys(), *value.values()):
            total += self.know(child)
        self._known[id(value)] = total
        return total

    def step(self) -> None:
        """One loop turn, call, filter or operator.

        Raises:
            BudgetExceeded: too many, or too late.
        """
        self._steps_left -= 1
        if self._steps_left < self._look_at or self._chars_left < self._look_at_chars:
            self._look()

    def join(self, left: str, right: str) -> str:
        """Both texts as one: what templates do most, in one step.

        Raises:
            BudgetExceeded: too many steps, too late, or too much text.
        """
        self.step()
        num_chars = len(left) + len(right)
        if num_chars > self._max_chars:
            self.check_size(num_chars)
        self.spend(num_chars)
        return left + right

    def _look(self) -> None:
        self._look_at = self._steps_left - LOOK_STEPS
        self._look_at_chars = self._chars_left - LOOK_CHARS
        if self._steps_left < 0:
            raise BudgetExceeded(f"the chat template takes more than {self._max_steps} steps")
        if time.perf_counter() < self._wall_deadline_s:
            return
        if self._deadline_s is None:
            self._deadline_s = time.thread_time() + self._timeout_s / 2
        elif time.thread_time() > self._deadline_s:
            raise BudgetExceeded(f"the chat template takes longer than {self._timeout_s:g} s")

    def each(self, iterable: Iterable[object]) -> Iterator[object]:
        """The same items, one step each."""
        for item in iterable:
            self.step()
            yield item

    def weigh(self, value: object) -> int:
        """Characters the value would print as, roughly; entries of containers count every time they occur.

        Raises:
            BudgetExceeded: more than one value may have.
        """
        if type(value) is str:  # most values by far
            if len(value) > self._max_chars:
                self.check_size(len(value))
            return len(value)
        return self._weigh(value, self._max_chars)

    def check_size(self, num_chars: int) -> None:
        """Refuses a value before it is made.

        Raises:
            BudgetExceeded: more than one value may have.
        """
        if num_chars > self._max_chars:
            raise BudgetExceeded(f"the chat template makes a value of more than {self._max_chars} characters")

    def spend(self, num_chars: int) -> None:
        """Counts text that is made.

        Raises:
            BudgetExceeded: more than all text of one rendering together.
        """
        self._chars_left -= num_chars
        if self._chars_left < 0:
            total = self._max_chars * TOTAL_FACTOR
            raise BudgetExceeded(f"the chat template makes more than {total} characters of text")

    def _weigh(self, value: object, limit: int | None) -> int:
        total = 0
        pending = [value]
        while pending:
            item = pending.pop()
            known = self._known.get(id(item))
            if known is not None:
                total += known
            elif isinstance(item, (str, bytes)):
                total += len(item) + NODE_CHARS
            elif item is None or item is True or item is False:
                total += NODE_CHARS
            else:
                if isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                    raise BudgetExceeded(f"the chat template makes an integer of more than {MAX_INTEGER_BITS} bits")
                total += NODE_CHARS
                pending += _children(item)
            if limit is not None and total + len(pending) * NODE_CHARS > limit:
                self.check_size(total + len(pending) * NODE_CHARS)
        return total


budget_of_thread: ContextVar[Budget] = ContextVar("budget_of_thread")
"""Set by whoever renders, for the time of one rendering."""


def _children(value: object) -> list[object]:
    kind = type(value)
    if kind is list:
        return list(cast(list[object], value))
    if kind is dict or isinstance(value, Mapping):
        value = cast(Mapping[object, object], value)
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, Namespace):
        # The class hides all other attributes from everybody.
        attributes: dict[str, object] = object.__getattribute__(value, "_Namespace__attrs")
        return list(attributes.values())
    return []
