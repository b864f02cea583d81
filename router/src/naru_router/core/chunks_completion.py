"""SSE chunks of a streamed completion. Fed by the request's life with the worker's deltas; does no I/O.

A choice's events: the echoed prompt where asked for, text chunks that are never empty, one chunk with the finish reason
and no text. One writer serves one prompt of the call; its choices start at `first_index`.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InternalError
from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.completion_request import Prompt
from naru_router.core.finish import finish_name
from naru_router.core.logprobs import LegacyLogprobs, prompt_text
from naru_router.core.sse import DONE, EVENT_HEAD, EVENT_TAIL, dump, event, quote
from naru_router.core.usage import TokenUsage


class _Choice:
    __slots__ = ("has_finished", "has_started", "index", "logprobs", "text_head")

    def __init__(self, index: int, head: bytes) -> None:
        self.index = index
        self.text_head = EVENT_HEAD + head + b'{"index":%d,"text":' % index
        self.has_started = False
        self.has_finished = False
        self.logprobs = LegacyLogprobs()


class CompletionChunks:
    """Writes the chunks of one prompt of one completion stream."""

    def __init__(
        self,
        *,
        head: bytes,
        first_index: int,
        n: int,
        include_usage: bool,
        has_logprobs: bool,
        echo: Prompt | None,
    ) -> None:
        self._has_logprobs = has_logprobs
        self._echo = echo
        self._reads_prompt = echo is not None
        self._tail = b"]" + (b',"usage":null' if include_usage else b"") + b"}" + EVENT_TAIL
        self._text_tail = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._choices = [_Choice(first_index + i, head) for i in range(n)]
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        self.usage = TokenUsage()
        """Set by the last delta."""

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none."""
        parts: list[bytes] = []
        choices, text_tail, has_logprobs = self._choices, self._text_tail, self._has_logprobs
        for delta in deltas:
            choice = choices[delta.index]
            text, finish_reason = delta.text, delta.finish_reason
            if self._reads_prompt and delta.prompt_logprobs:
                self._prompt_logprobs = delta.prompt_logprobs
            if not choice.has_started and (text or finish_reason):
                choice.has_started = True
                self._write_echo(choice, parts)
            if has_logprobs:
                choice.logprobs.add(delta.logprobs)
            if text:
                parts += (choice.text_head, quote(text), self._take_text_tail(choice) if has_logprobs else text_tail)
            if finish_reason:
                self._finish(choice, finish_name(finish_reason), parts)
        last = deltas[-1]
        if last.HasField("usage"):
            self.usage = TokenUsage.from_wire(last.usage)
        return b"".join(parts)

    def check_finished(self) -> None:
        """Checks that nothing is missing after the last delta.

        Raises:
            InternalError: a choice has not finished.
        """
        if not all(choice.has_finished for choice in self._choices):
            raise InternalError("the worker ended the request before all of its choices; send it again")

    def _write_echo(self, choice: _Choice, parts: list[bytes]) -> None:
        if self._echo is None:
            return
        text = echo_text(self._echo, self._prompt_logprobs)
        if self._has_logprobs:
            add_echo_logprobs(choice.logprobs, self._echo, self._prompt_logprobs, text)
        if text:
            tail = self._take_text_tail(choice) if self._has_logprobs else self._text_tail
            parts += (choice.text_head, quote(text), tail)

    def _take_text_tail(self, choice: _Choice) -> bytes:
        return b',"logprobs":' + dump(choice.logprobs.take()) + b',"finish_reason":null}' + self._tail

    def _finish(self, choice: _Choice, reason: str, parts: list[bytes]) -> None:
        if choice.has_finished:
            raise InternalError("the worker ended a choice twice; send the request again")
        choice.has_finished = True
        logprobs = dump(choice.logprobs.take()) if self._has_logprobs else b"null"
        parts += (choice.text_head, b'"","logprobs":', logprobs, b',"finish_reason":', quote(reason), b"}", self._tail)


def completion_head(answer_id: str, created_s: int, model: str) -> bytes:
    """The JSON before the choices, the same in all chunks of a stream."""
    return b'{"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":[' % (
        quote(answer_id),
        created_s,
        quote(model),
    )


def completion_end(head: bytes, usage: TokenUsage | None) -> bytes:
    """The events after all prompts: usage where it was asked for, and the end mark."""
    if usage is None:
        return DONE
    return event(head + b'],"usage":' + dump(usage.to_openai()) + b"}") + DONE


def echo_text(prompt: Prompt, positions: Sequence[PositionLogprobs]) -> str:
    """What `echo` repeats: the prompt as it was sent, or its token ids' text as the worker tells it."""
    return prompt if isinstance(prompt, str) else prompt_text(positions)


def add_echo_logprobs(
    logprobs: LegacyLogprobs, prompt: Prompt, positions: Sequence[PositionLogprobs], text: str
) -> None:
    """Adds the echoed prompt's positions and leaves the offset where its text ends."""
    logprobs.add_prompt(positions, prompt if isinstance(prompt, str) else None)
    logprobs.set_num_chars(len(text))
