"""How a sequence is held to a grammar: one matcher a sequence, moved on by each token that is committed.

The scheduler moves it; what it matches, and how masks are made of it, is the adapters' affair. Its state follows
`Sequence.token_ids` alone, so that preemption and prefix hits change nothing.
"""

from __future__ import annotations

import enum
from typing import Protocol


class MatchState(enum.Enum):
    """Where a sequence stands after a token."""

    OPEN = "open"
    """More may follow."""
    COMPLETE = "complete"
    """Nothing may follow; the token is part of the text."""
    ENDED = "ended"
    """The token was the end itself, and has no text."""
    FAILED = "failed"
    """It cannot go on; see `TokenMatcher.failure`."""


class TokenMatcher(Protocol):
    """Belongs to one sequence."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty: it can. May be set by the computation of a mask, too."""

    @property
    def param(self) -> str:
        """The request's field that asked for it."""

    def advance(self, token_id: int) -> MatchState:
        """Takes the token that was drawn."""
