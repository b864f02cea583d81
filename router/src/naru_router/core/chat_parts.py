"""What a chat's output is made of: text, reasoning, calls of tools. Told apart by the model's output format.

A reader is made for each choice; the writers of all chat APIs work on what it gives. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import InternalError
from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.finish import finish_name
from naru_router.core.usage import TokenUsage


@dataclass(frozen=True, slots=True)
class TextPart:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """More of what the model thought before it answered; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A call of a tool: its first part has an id and a name, every one may have more of the arguments.

    The arguments of one call, joined, are a JSON object where the model made no mistake.
    """

    index: int
    """Which call of the choice, from 0; one call is complete before the next one begins."""
    call_id: str = ""
    name: str = ""
    arguments: str = ""


Part = TextPart | ReasoningPart | ToolCallPart


class OutputReader(Protocol):
    """Reads the text of one choice as it comes."""

    def feed(self, text: str) -> Sequence[Part]:
        """What is certain now."""

    def finish(self) -> Sequence[Part]:
        """The choice has ended: what was withheld."""


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """Something new of one choice."""

    index: int
    part: Part | None = None
    finish_reason: str = ""
    """stop, length or tool_calls: nothing of the choice follows."""
    logprobs: Sequence[PositionLogprobs] = ()
    """Of the tokens up to here that were not told yet."""


class PlainReader:
    """All of it is text."""

    def feed(self, text: str) -> Sequence[Part]:
        """The text."""
        return (TextPart(text),) if text else ()

    def finish(self) -> Sequence[Part]:
        """Nothing is withheld."""
        return ()


class PartFeed:
    """Turns the deltas of one job into events of its choices."""

    def __init__(self, n: int, make_reader: Callable[[], OutputReader] | None) -> None:
        """`make_reader` None: all output is text."""
        self._readers = [make_reader() if make_reader is not None else PlainReader() for _ in range(n)]
        self._logprobs: list[list[PositionLogprobs]] = [[] for _ in range(n)]
        self._has_calls = [False] * n
        self._open = [True] * n
        self.usage = TokenUsage()
        """Set by the last delta."""

    def feed(self, deltas: Sequence[Delta]) -> list[ChoiceEvent]:
        """The events of the deltas, possibly none.

        Raises:
            InternalError: a choice ended twice or oddly.
        """
        events: list[ChoiceEvent] = []
        for delta in deltas:
            index = delta.index
            if delta.logprobs:
                self._logprobs[index].extend(delta.logprobs)
            if delta.text:
                self._add(index, self._readers[index].feed(delta.text), events)
            if delta.finish_reason:
                self._finish(index, finish_name(delta.finish_reason), events)
            if delta.HasField("usage"):
                self.usage = TokenUsage.from_wire(delta.usage)
        return events

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: a choice has not finished.
        """
        if any(self._open):
            raise InternalError("the worker ended the request before all of its choices; send it again")

    def _add(self, index: int, parts: Sequence[Part], events: list[ChoiceEvent]) -> None:
        for part in parts:
            if isinstance(part, ToolCallPart):
                self._has_calls[index] = True
            events.append(ChoiceEvent(index, part, logprobs=self._take_logprobs(index)))

    def _finish(self, index: int, reason: str, events: list[ChoiceEvent]) -> None:
        if not self._open[index]:
            raise InternalError("the worker ended a choice twice; send the request again")
        self._open[index] = False
        self._add(index, self._readers[index].finish(), events)
        if reason == "stop" and self._has_calls[index]:
            reason = "tool_calls"
        events.append(ChoiceEvent(index, finish_reason=reason, logprobs=self._take_logprobs(index)))

    def _take_logprobs(self, index: int) -> Sequence[PositionLogprobs]:
        taken, self._logprobs[index] = self._logprobs[index], []
        return taken
