"""One sequence's matcher over the grammar library's. Moved by the engine thread; masks are made of it in another one,
while the engine thread waits for the step that needs them.
"""

from __future__ import annotations

from llguidance import LLMatcher

from naru_worker.core.token_matcher import MatchState

MAX_REASON_CHARS = 300


class GrammarMatcher:
    """See `core.token_matcher.TokenMatcher`."""

    __slots__ = ("_is_ended", "_param", "failure", "mask_words", "native")

    def __init__(self, native: LLMatcher, mask_words: int, param: str) -> None:
        """`mask_words`: 32 bit words of a mask of its vocabulary."""
        self.native = native
        self.mask_words = mask_words
        self.failure = ""
        """Why it cannot go on; empty: it can."""
        self._param = param
        self._is_ended = False

    @property
    def param(self) -> str:
        """The request's field that asked for it."""
        return self._param

    def look(self) -> None:
        """Takes over what the library found out while it made a mask: that nothing follows, or that it cannot go on."""
        if self.native.is_stopped():
            self._stop()

    def advance(self, token_id: int) -> MatchState:
        """Takes the token that was drawn, by a mask that has been looked at."""
        if self.failure:
            return MatchState.FAILED
        if self._is_ended:
            return MatchState.ENDED  # whatever was drawn stands for the end
        native = self.native
        if not native.consume_token(token_id):
            self.failure = reason_of(native) or f"token {token_id} does not continue the text"
            return MatchState.FAILED
        if not native.is_stopped():
            return MatchState.OPEN
        self._stop()
        if self.failure:
            return MatchState.FAILED
        return MatchState.ENDED if native.stop_reason() == "EndOfSentence" else MatchState.COMPLETE

    def _stop(self) -> None:
        if self.native.is_error():
            self.failure = reason_of(self.native)
        else:
            self._is_ended = True


def reason_of(native: LLMatcher) -> str:
    """The library's words for what is wrong, in one short line; empty: nothing is."""
    words = " ".join(native.get_error().replace("<non-verbose/>", "").split())
    return words if len(words) <= MAX_REASON_CHARS else f"{words[:MAX_REASON_CHARS]}..."
