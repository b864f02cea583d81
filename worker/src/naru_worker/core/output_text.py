"""The text of one sequence: tokens in, certain text out, stopped by its stop strings.

Used by the engine loop right after the scheduler's commit, and before the next plan. A delta with a finish reason is
final: the loop hands it to `Scheduler.finish_sequence`, which does nothing where the sequence had ended already.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_worker.core.detokenizer import Detokenizer, TokenBytes
from naru_worker.core.request import FinishReason
from naru_worker.core.step import SequenceOutput
from naru_worker.core.stop_strings import StopMatcher, StopStrings


@dataclass(slots=True)  # one for each token: frozen ones take twice as long to make
class TextDelta:
    """New text of one sequence.

    `text` may be empty while a character or a stop string is open; `num_tokens` counts the tokens taken all the same,
    so that their logprobs can go out with this delta. Tokens after the one that completed a stop string do not count.
    """

    text: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    """The stop string, or ``token:<id>`` of a stop token."""


class OutputStream:
    """Detokenizer and stop matcher of one sequence.

    A stop string counts when the token that completes it comes after the first `min_tokens`; one that was completed
    earlier is ordinary text. A stop string that spells a special token stops at that token, though it has no text
    (unless `show_special_tokens`; a token that ends the sequence never has any).
    """

    def __init__(
        self,
        tokens: TokenBytes,
        stops: StopStrings,
        *,
        min_tokens: int = 0,
        strip_leading_space: bool = False,
        show_special_tokens: bool = False,
    ) -> None:
        self.num_tokens = 0
        """Output tokens that count so far."""
        self._tokens = tokens
        self._stops = stops
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(
            tokens, strip_leading_space=strip_leading_space, show_special_tokens=show_special_tokens
        )
        self._matcher = StopMatcher(stops)
        self._is_closed = False

    def resume(self, token_ids: Iterable[int], *, is_finished: bool) -> None:
        """Takes output that was told elsewhere: from here on all is as if it had been pushed.

        Raises:
            InvalidRequest: a stop string is in it, so that nothing should follow.
        """
        token_ids = tuple(token_ids)
        self._is_closed = is_finished
        if is_finished:
            self.num_tokens = len(token_ids)
            return
        stop = self._take(token_ids, [])
        if stop is not None:
            raise InvalidRequest(f"prior holds the stop string {stop!r}; its choice has finished", param="prior")

    def fork(self) -> OutputStream:
        """One that stands where this one does, and goes on by itself."""
        other = copy.copy(self)
        other._detokenizer = self._detokenizer.fork()
        other._matcher = self._matcher.fork()
        return other

    def ahead(self, token_id: int) -> tuple[OutputStream, str | None]:
        """A fork that has taken one token more, and the stop string this completes."""
        other = self.fork()
        return other, other._take((token_id,), [])

    def push(self, output: SequenceOutput) -> TextDelta:
        """Takes what the scheduler committed. Once a delta had a finish reason, all further ones are empty."""
        if self._is_closed:
            return TextDelta("", 0)
        num_before = self.num_tokens
        new_token_ids = output.new_token_ids
        if output.finish_reason is None and len(new_token_ids) == 1 and not self._stops.stops:
            self.num_tokens = num_before + 1
            return TextDelta(self._detokenizer.feed(new_token_ids[0]), 1)
        texts: list[str] = []
        stop = self._take(output.text_token_ids, texts)
        if stop is not None:
            self._is_closed = True
            return TextDelta("".join(texts), self.num_tokens - num_before, FinishReason.STOP, stop)
        self.num_tokens = num_before + len(output.new_token_ids)
        if output.finish_reason is not None:
            self._is_closed = True
            stop = self._flush(texts)
            if stop is not None:
                return TextDelta("".join(texts), self.num_tokens - num_before, FinishReason.STOP, stop)
        num_tokens = self.num_tokens - num_before
        return TextDelta("".join(texts), num_tokens, output.finish_reason, output.stop_reason)

    def _take(self, token_ids: Iterable[int], texts: list[str]) -> str | None:
        """Appends certain text; the stop string that was found."""
        for token_id in token_ids:
            self.num_tokens += 1
            obeys = self.num_tokens > self._min_tokens
            if self._stops.stops:
                special = self._tokens.special_text(token_id)
                if special is not None and obeys and special in self._stops.stops:
                    self._flush(texts)
                    return special
            match = self._matcher.feed(self._detokenizer.feed(token_id), obeys=obeys)
            texts.append(match.text)
            if match.stop is not None:
                return match.stop
        return None

    def _flush(self, texts: list[str]) -> str | None:
        """Appends what was held back. The broken character at the end is text too: it may complete a stop string."""
        match = self._matcher.feed(self._detokenizer.finish(), obeys=self.num_tokens > self._min_tokens)
        texts.append(match.text)
        if match.stop is None:
            texts.append(self._matcher.finish())
        return match.stop
