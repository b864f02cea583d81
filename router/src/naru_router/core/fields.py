"""Typed reads of one JSON object's fields. Used by the request parsers of both endpoints.

A null counts as absent, a boolean is no number, and every refusal names the field by its path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

from naru_proto.errors import InvalidRequest

MAX_SHOWN_CHARS = 60


def shown(value: object) -> str:
    """The value for an error message, short whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "…")
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)} fields"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def refuse(path: str, value: object, wanted: str) -> NoReturn:
    """Raises the refusal of one field.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest(f"{path} is {shown(value)}; it must be {wanted}", param=path)


def check_text(path: str, value: object) -> str:
    """The value as text that UTF-8 can carry.

    Raises:
        InvalidRequest: not a string, or half of a surrogate pair inside.
    """
    if not isinstance(value, str):
        refuse(path, value, "a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as exc:
            message = f"{path} holds half of a UTF-16 surrogate pair at character {exc.start}; send whole characters"
            raise InvalidRequest(message, param=path) from exc
    return value


def check_integer(path: str, value: object, low: int, high: int) -> int:
    """The value as an integer in [low, high].

    Raises:
        InvalidRequest: another type (booleans and 1.0 included) or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(path, value, f"an integer in [{low}, {high}]")
    return value


def check_number(path: str, value: object, low: float, high: float) -> float:
    """The value as a finite number in [low, high].

    Raises:
        InvalidRequest: another type (booleans included), not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(path, value, f"a number in [{low:g}, {high:g}]")
    if not low <= value <= high or not math.isfinite(value):
        refuse(path, value, f"a number in [{low:g}, {high:g}]")
    return float(value)


class Fields:
    """One JSON object and the path that leads to it."""

    __slots__ = ("_data", "_prefix")

    def __init__(self, data: Mapping[str, object], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix

    def items(self) -> Iterable[tuple[str, object]]:
        """All fields as they are, nulls included."""
        return self._data.items()

    def path(self, name: str) -> str:
        """The field's name as an error gives it, e.g. ``stream_options.include_usage``."""
        return self._prefix + name

    def get(self, name: str) -> object:
        """The raw value, None when absent or null."""
        return self._data.get(name)

    def text(self, name: str) -> str | None:
        """A string, or None when absent."""
        value = self._data.get(name)
        return None if value is None else check_text(self.path(name), value)

    def boolean(self, name: str) -> bool | None:
        """A boolean, or None when absent."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, bool):
            refuse(self.path(name), value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None when absent."""
        value = self._data.get(name)
        return None if value is None else check_integer(self.path(name), value, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number in [low, high], or None when absent."""
        value = self._data.get(name)
        return None if value is None else check_number(self.path(name), value, low, high)

    def array(self, name: str) -> list[object] | None:
        """A list of anything, or None when absent."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, list):
            refuse(self.path(name), value, "an array")
        return value

    def object(self, name: str) -> Fields | None:
        """A nested object, or None when absent."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            refuse(self.path(name), value, "an object")
        return Fields(value, f"{self.path(name)}.")

    def names(self) -> list[str]:
        """The names present, nulls left out."""
        return [name for name, value in self._data.items() if value is not None]
