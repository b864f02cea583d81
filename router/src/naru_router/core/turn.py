"""One turn of an assistant as its deltas come: parts, how it ended, what it cost. For APIs whose chats have one choice.

Used by the Responses and the Messages writers. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.chat_parts import ChoiceEvent, OutputReader, PartFeed, ReasoningPart
from naru_router.core.usage import TokenUsage


class Turn:
    """Mutable; fed with the deltas of one job."""

    def __init__(self, make_reader: Callable[[], OutputReader] | None) -> None:
        """`make_reader`: of the job."""
        self._feed = PartFeed(1, make_reader)
        self._num_untold = 0
        self.reasoning_tokens = 0
        """Output tokens up to the last piece of reasoning that each of them made."""
        self.finish_reason = ""
        """stop, length or tool_calls; empty: it goes on."""
        self.stop_reason = ""
        """The stop string that ended it, or ``token:<id>``."""

    @property
    def usage(self) -> TokenUsage:
        """All zero until the last delta."""
        return self._feed.usage

    def feed(self, deltas: Sequence[Delta]) -> list[ChoiceEvent]:
        """The events of the deltas, possibly none.

        Raises:
            InternalError: the turn ended twice or oddly.
        """
        events: list[ChoiceEvent] = []
        for delta in deltas:
            if delta.stop_reason:
                self.stop_reason = delta.stop_reason
            self._num_untold += delta.num_tokens
            found = self._feed.feed((delta,))
            if found:
                if any(isinstance(event.part, ReasoningPart) for event in found):
                    self.reasoning_tokens += self._num_untold
                self._num_untold = 0
                self.finish_reason = found[-1].finish_reason
                events += found
        return events

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: the turn has not ended.
        """
        self._feed.check_finished()
