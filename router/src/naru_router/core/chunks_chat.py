"""SSE chunks of a streamed chat answer. Fed by the request's life with the worker's deltas; does no I/O.

A choice's events: one role chunk, text chunks that are never empty, one chunk with the finish reason and an empty
delta. The JSON around the text is built once a stream: a token costs one quoted string.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InternalError
from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.finish import finish_name
from naru_router.core.logprobs import chat_content
from naru_router.core.sse import DONE, EVENT_HEAD, EVENT_TAIL, dump, event, quote
from naru_router.core.usage import TokenUsage


class _Choice:
    __slots__ = ("has_finished", "has_started", "held_logprobs", "index", "text_head")

    def __init__(self, index: int, head: bytes) -> None:
        self.index = index
        self.text_head = EVENT_HEAD + head + b'%d,"delta":{"content":' % index
        self.has_started = False
        self.has_finished = False
        self.held_logprobs: list[PositionLogprobs] = []
        """Of tokens whose text is withheld."""


class ChatChunks:
    """Writes the chunks of one chat stream."""

    def __init__(
        self,
        *,
        answer_id: str,
        created_s: int,
        model: str,
        n: int,
        include_usage: bool,
        has_logprobs: bool = False,
    ) -> None:
        self._base = b'{"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"choices":[' % (
            quote(answer_id),
            created_s,
            quote(model),
        )
        self._head = self._base + b'{"index":'
        self._include_usage = include_usage
        self._has_logprobs = has_logprobs
        self._tail = b"]" + (b',"usage":null' if include_usage else b"") + b"}" + EVENT_TAIL
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._choices = [_Choice(i, self._head) for i in range(n)]
        self.usage = TokenUsage()
        """Set by the last delta."""

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none."""
        parts: list[bytes] = []
        choices, text_tail, has_logprobs = self._choices, self._text_tail, self._has_logprobs
        for delta in deltas:
            choice = choices[delta.index]
            text = delta.text
            if has_logprobs:
                choice.held_logprobs.extend(delta.logprobs)
            if text:
                if not choice.has_started:
                    self._start(choice, parts)
                parts += (choice.text_head, quote(text), self._take_text_tail(choice) if has_logprobs else text_tail)
            if delta.finish_reason:
                self._finish(choice, finish_name(delta.finish_reason), parts)
        last = deltas[-1]
        if last.HasField("usage"):
            self.usage = TokenUsage.from_wire(last.usage)
        return b"".join(parts)

    def end(self) -> bytes:
        """The events after the last delta: usage where it was asked for, and the end mark.

        Raises:
            InternalError: a choice has not finished.
        """
        if not all(choice.has_finished for choice in self._choices):
            raise InternalError("the worker ended the request before all of its choices; send it again")
        if not self._include_usage:
            return DONE
        return event(self._base + b'],"usage":' + dump(self.usage.to_openai()) + b"}") + DONE

    def _start(self, choice: _Choice, parts: list[bytes]) -> None:
        choice.has_started = True
        delta = b'%d,"delta":{"role":"assistant","content":""' % choice.index
        parts += (EVENT_HEAD, self._head, delta, self._text_tail)

    def _take_text_tail(self, choice: _Choice) -> bytes:
        if not choice.held_logprobs:
            return self._text_tail
        return b'},"logprobs":' + self._take_logprobs(choice) + b',"finish_reason":null}' + self._tail

    def _take_logprobs(self, choice: _Choice) -> bytes:
        if not choice.held_logprobs:
            return b"null"
        content = chat_content(choice.held_logprobs)
        choice.held_logprobs = []
        return dump({"content": content, "refusal": None})

    def _finish(self, choice: _Choice, reason: str, parts: list[bytes]) -> None:
        if choice.has_finished:
            raise InternalError("the worker ended a choice twice; send the request again")
        if not choice.has_started:
            self._start(choice, parts)
        choice.has_finished = True
        # The tokens whose text never came (a stop string, the end of the sequence) still have their logprobs.
        logprobs = self._take_logprobs(choice)
        body = b'%d,"delta":{},"logprobs":%s,"finish_reason":%s}' % (choice.index, logprobs, quote(reason))
        parts += (EVENT_HEAD, self._head, body, self._tail)
