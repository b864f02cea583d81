"""SSE chunks of a streamed chat answer whose text, reasoning and calls of tools are told apart.

Fed by the request's life with the deltas; does no I/O. The order of a choice's events is as in `chunks_chat`: one
role chunk, chunks that are never empty, one chunk with the finish reason and an empty delta. Of each call the first
chunk has its id, type and name and no arguments, later ones arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.chat_parts import ChoiceEvent, OutputReader, PartFeed, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.logprobs import chat_content
from naru_router.core.sse import DONE, EVENT_HEAD, EVENT_TAIL, dump, event, quote
from naru_router.core.usage import TokenUsage


class PartChunks:
    """Writes the chunks of one chat stream."""

    def __init__(
        self,
        *,
        answer_id: str,
        created_s: int,
        model: str,
        n: int,
        include_usage: bool,
        make_reader: Callable[[], OutputReader],
        has_logprobs: bool = False,
        writes_function_call: bool = False,
    ) -> None:
        """`writes_function_call`: calls have the older form, which has room for one."""
        self._base = b'{"id":%s,"object":"chat.completion.chunk","created":%d,"model":%s,"choices":[' % (
            quote(answer_id),
            created_s,
            quote(model),
        )
        self._heads = [EVENT_HEAD + self._base + b'{"index":%d,"delta":{' % index for index in range(n)]
        self._include_usage = include_usage
        self._has_logprobs = has_logprobs
        self._tail = b"]" + (b',"usage":null' if include_usage else b"") + b"}" + EVENT_TAIL
        self._part_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._write_call = _older_call if writes_function_call else _call
        self._writes_function_call = writes_function_call
        self._has_started = [False] * n
        self._feed = PartFeed(n, make_reader)

    @property
    def usage(self) -> TokenUsage:
        """Set by the last delta."""
        return self._feed.usage

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none."""
        pieces: list[bytes] = []
        for each in self._feed.feed(deltas):
            index = each.index
            if not self._has_started[index]:
                self._has_started[index] = True
                # What has calls alone has no content: null, as in the whole message.
                content = b'""' if each.part is None or type(each.part) is TextPart else b"null"
                pieces += (self._heads[index], b'"role":"assistant","content":', content, self._part_tail)
            part = each.part
            if part is None:
                self._finish(each, pieces)
                continue
            tail = self._logprobs_tail(each.logprobs) if each.logprobs and self._has_logprobs else self._part_tail
            if type(part) is ToolCallPart:
                pieces += (self._heads[index], self._write_call(part), tail)
            elif type(part) is TextPart:
                pieces += (self._heads[index], b'"content":', quote(part.text), tail)
            elif type(part) is ReasoningPart:
                text = quote(part.text)
                pieces += (self._heads[index], b'"reasoning_content":', text, b',"reasoning":', text, tail)
        return b"".join(pieces)

    def end(self) -> bytes:
        """The events after the last delta: usage where it was asked for, and the end mark.

        Raises:
            InternalError: a choice has not finished.
        """
        self._feed.check_finished()
        if not self._include_usage:
            return DONE
        return event(self._base + b'],"usage":' + dump(self.usage.to_openai()) + b"}") + DONE

    def _logprobs_tail(self, positions: Sequence[PositionLogprobs]) -> bytes:
        logprobs = dump({"content": chat_content(positions), "refusal": None})
        return b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._tail

    def _finish(self, end: ChoiceEvent, pieces: list[bytes]) -> None:
        logprobs = b"null"
        if self._has_logprobs and end.logprobs:
            logprobs = dump({"content": chat_content(end.logprobs), "refusal": None})
        reason = older_reason(end.finish_reason) if self._writes_function_call else end.finish_reason
        pieces += (
            self._heads[end.index],
            b'},"logprobs":%s,"finish_reason":%s}' % (logprobs, quote(reason)),
            self._tail,
        )


def older_reason(reason: str) -> str:
    """A finish reason in the words of the older form of calls."""
    return "function_call" if reason == "tool_calls" else reason


def _call(part: ToolCallPart) -> bytes:
    arguments = quote(part.arguments)
    if not part.call_id:
        return b'"tool_calls":[{"index":%d,"function":{"arguments":%s}}]' % (part.index, arguments)
    return b'"tool_calls":[{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":%s}}]' % (
        part.index,
        quote(part.call_id),
        quote(part.name),
        arguments,
    )


def _older_call(part: ToolCallPart) -> bytes:
    arguments = quote(part.arguments)
    if not part.call_id:
        return b'"function_call":{"arguments":%s}' % arguments
    return b'"function_call":{"name":%s,"arguments":%s}' % (quote(part.name), arguments)
