"""Typed, bounded reading of a model's metadata: config.json and GGUF keys alike.

Called by the config parsers. Model files are untrusted: every number has a range, every type is checked, and an error
names file, field and value. Does not know any model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from naru_proto.errors import LoadError

MAX_VOCAB_SIZE = 2**22
MAX_HIDDEN_SIZE = 2**17
MAX_INTERMEDIATE_SIZE = 2**20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 2**24
"""Limits far above any published model: a config beyond them is broken or hostile."""

_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """The value's repr, cut to a length fit for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


@dataclass(frozen=True, slots=True)
class Fields:
    """One file's key-value metadata. A key whose value is None counts as absent."""

    file: str
    values: Mapping[str, object]

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises LoadError naming file and field."""
        raise LoadError(f"{self.file}: {name} {problem}", param=name)

    def has(self, name: str) -> bool:
        """Whether the key is present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high].

        Raises:
            LoadError: absent without a default, of another type, or out of range.
        """
        value = self.values.get(name)
        if value is None:
            if default is not None:
                return default
            self.fail(name, "is missing; an integer is needed")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"is {shown(value)}; it must be an integer in [{low}, {high}]")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high].

        Raises:
            LoadError: absent without a default, of another type, or out of range.
        """
        value = self.values.get(name)
        if value is None:
            if default is not None:
                return default
            self.fail(name, "is missing; a number is needed")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(name, f"is {shown(value)}; it must be a number")
        if not (low <= value <= high and math.isfinite(value)):
            self.fail(name, f"is {shown(value)}; it must be a finite number in [{low:g}, {high:g}]")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            LoadError: of another type.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"is {shown(value)}; it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string.

        Raises:
            LoadError: of another type.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, f"is {shown(value)}; it must be a string")
        return value

    def table(self, name: str) -> Mapping[str, object]:
        """A nested object; empty when absent.

        Raises:
            LoadError: of another type.
        """
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(name, f"is {shown(value)}; it must be an object")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        """A token id or a list of them, as a set; empty when absent.

        Raises:
            LoadError: of another type or out of range.
        """
        value = self.values.get(name)
        if value is None:
            return frozenset()
        items: Sequence[object] = value if isinstance(value, list) else [value]
        if len(items) > 1024:
            self.fail(name, f"lists {len(items)} ids; at most 1024 are allowed")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < MAX_VOCAB_SIZE:
                self.fail(name, f"holds {shown(item)}; token ids are integers in [0, {MAX_VOCAB_SIZE})")
        return frozenset(item for item in items if isinstance(item, int))
