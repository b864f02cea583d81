"""What kopf says, among our own logs: warnings alone, and the same words only now and then. Used by the watch."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_REPEAT_S = 60.0
"""The same words are passed on no more often."""
_MAX_WORDS = 300
_NUMBER = re.compile(r"\d+")


@contextlib.contextmanager
def forwarded_logs() -> Iterator[None]:
    """While open, kopf's loggers say nothing but warnings, and those through ours."""
    theirs, handler = logging.getLogger("kopf"), _Forward()
    level, propagate = theirs.level, theirs.propagate
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)
        theirs.setLevel(level)
        theirs.propagate = propagate


def words_of(text: str) -> str:
    """A text on one line, cut."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_WORDS else line[: _MAX_WORDS - 1] + "…"


class _Forward(logging.Handler):
    """Passes kopf's warnings on under our name, the same words once a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said_s: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        words = words_of(record.getMessage())
        if words.startswith("OS signals are ignored"):
            return  # as it should be
        gist = _NUMBER.sub("#", words.partition(" -> ")[0])  # neither the number of the attempt nor what it met
        now_s = time.monotonic()
        self._said_s = {said: at_s for said, at_s in self._said_s.items() if now_s - at_s < _REPEAT_S}
        if gist not in self._said_s:
            self._said_s[gist] = now_s
            logger.warning("%s", words)
