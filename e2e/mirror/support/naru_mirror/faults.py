"""Faults that the mirror shows when told to, and a log of what was asked. Called by the server; does no I/O."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

_MAX_LOGGED = 10_000


class FaultError(ValueError):
    """A fault's description cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with answers under a path."""

    path: str
    """Regular expression, searched in the request's path."""
    times: int = 1
    """How many requests it meets; 0 is all until it is removed."""
    status: int = 0
    """Answer with this status and a short text."""
    cut_after_bytes: int = -1
    """Break the connection after so many bytes of the body."""
    wrong_bytes: bool = False
    """Send a body of the right length with other bytes."""
    delay_s: float = 0.0
    """Wait before the answer."""
    rate_bytes_per_s: int = 0
    """Send the body no faster."""

    def __post_init__(self) -> None:
        """Raises: FaultError: the expression cannot be read, or nothing would go wrong."""
        try:
            re.compile(self.path)
        except re.error as exc:
            raise FaultError(f"path {self.path!r} is no regular expression: {exc}") from exc
        if self.times < 0 or self.delay_s < 0 or self.rate_bytes_per_s < 0:
            raise FaultError("times, delay_s and rate_bytes_per_s are 0 or more")
        if self.status and not 400 <= self.status <= 599:
            raise FaultError(f"status {self.status} is no error; use 400 to 599")
        if not (self.status or self.cut_after_bytes >= 0 or self.wrong_bytes or self.delay_s or self.rate_bytes_per_s):
            raise FaultError("a fault needs one of status, cut_after_bytes, wrong_bytes, delay_s, rate_bytes_per_s")


def read_fault(value: Any) -> Fault:
    """A fault from decoded JSON.

    Raises:
        FaultError: unknown or missing fields, or wrong types.
    """
    if not isinstance(value, dict):
        raise FaultError("a fault is a JSON object")
    kinds: dict[str, type | tuple[type, ...]] = {
        "path": str, "times": int, "status": int, "cut_after_bytes": int, "wrong_bytes": bool,
        "delay_s": (int, float), "rate_bytes_per_s": int,
    }  # fmt: skip
    for key, item in value.items():
        if key not in kinds:
            raise FaultError(f"a fault has no {key!r}; it has {', '.join(kinds)}")
        if not isinstance(item, kinds[key]) or (isinstance(item, bool) and kinds[key] is not bool):
            raise FaultError(f"{key} cannot be {item!r}")
    if "path" not in value:
        raise FaultError("a fault needs a path")
    return Fault(**value)


class Faults:
    """The faults in force; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: list[tuple[Fault, int]] = []

    def add(self, fault: Fault) -> None:
        """Puts one in force, after those that are."""
        with self._lock:
            self._left.append((fault, fault.times))

    def clear(self) -> None:
        """Nothing goes wrong any more."""
        with self._lock:
            self._left.clear()

    def take(self, path: str) -> Fault | None:
        """The first fault that meets a request, counted as shown."""
        with self._lock:
            for index, (fault, left) in enumerate(self._left):
                if re.search(fault.path, path):
                    if left == 1:
                        del self._left[index]
                    elif left > 1:
                        self._left[index] = (fault, left - 1)
                    return fault
        return None


@dataclass(slots=True)
class Request:
    """One request and what became of it."""

    method: str
    path: str
    range: str
    is_authorized: bool
    """Whether it carried an Authorization header."""
    status: int = 0
    sent_bytes: int = 0
    """Of the body."""


class RequestLog:
    """The last requests, oldest first; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: deque[Request] = deque(maxlen=_MAX_LOGGED)

    def add(self, request: Request) -> None:
        """Remembers a request; its outcome may still change."""
        with self._lock:
            self._requests.append(request)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._requests.clear()

    def all(self) -> list[Request]:
        """Copies of the requests."""
        with self._lock:
            return [dataclasses.replace(request) for request in self._requests]
