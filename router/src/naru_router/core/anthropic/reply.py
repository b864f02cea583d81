"""Messages: what a turn comes to in the Messages API, and the events that tell of it as it comes. Pure.

One object makes both, so that the blocks of a stream are those of a whole reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson

from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.anthropic.request import Thinking
from naru_router.core.chat_parts import ChoiceEvent, OutputReader, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.named_events import named_event
from naru_router.core.turn import Turn
from naru_router.core.usage import TokenUsage

Object = dict[str, object]
BROKEN_INPUT = "INVALID_JSON"
"""Key under which arguments that are no JSON object are told as they are."""


class MessageOutput:
    """The blocks of one message, and the events of each. Mutable."""

    def __init__(self, thinking: Thinking) -> None:
        """`thinking`: whether what the model thinks is told."""
        self._thinking = thinking
        self._blocks: list[Object] = []
        self._texts: list[str] = []
        """Of the open block."""
        self._open = ""
        """Type of the open block; empty: there is none."""

    def add(self, event: ChoiceEvent) -> list[Object]:
        """What is told of something new, possibly nothing."""
        told: list[Object] = []
        part = event.part
        if isinstance(part, TextPart):
            self._begin("text", {"type": "text", "text": ""}, told)
            self._continue(part.text, {"type": "text_delta", "text": part.text}, told)
        elif isinstance(part, ReasoningPart):
            self._think(part, told)
        elif isinstance(part, ToolCallPart):
            self._call(part, told)
        if event.finish_reason:
            self._close(told)
        return told

    def content(self) -> list[Object]:
        """The blocks, once nothing follows."""
        return self._blocks

    def _think(self, part: ReasoningPart, told: list[Object]) -> None:
        if not self._thinking.is_shown:
            return
        self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}, told)
        if not self._thinking.is_emptied:
            self._continue(part.text, {"type": "thinking_delta", "thinking": part.text}, told)

    def _call(self, part: ToolCallPart, told: list[Object]) -> None:
        if part.call_id:
            self._close(told)
            self._begin("tool_use", {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}, told)
        if part.arguments:
            self._continue(part.arguments, {"type": "input_json_delta", "partial_json": part.arguments}, told)

    def _begin(self, kind: str, block: Object, told: list[Object]) -> None:
        if self._open == kind:
            return
        self._close(told)
        self._open = kind
        told.append({"type": "content_block_start", "index": len(self._blocks), "content_block": dict(block)})
        self._blocks.append(block)

    def _continue(self, text: str, delta: Object, told: list[Object]) -> None:
        self._texts.append(text)
        told.append({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _close(self, told: list[Object]) -> None:
        if not self._open:
            return
        index, text = len(self._blocks) - 1, "".join(self._texts)
        if self._open == "tool_use":
            self._blocks[index]["input"] = parsed_input(text)
        else:
            self._blocks[index][self._open] = text
        if self._open == "thinking":
            # Nothing is signed here; clients that wait for a signature before they keep the block have one.
            delta = {"type": "signature_delta", "signature": ""}
            told.append({"type": "content_block_delta", "index": index, "delta": delta})
        told.append({"type": "content_block_stop", "index": index})
        self._open = ""
        self._texts = []


def parsed_input(text: str) -> Object:
    """A call's arguments as an object; what is none stands under BROKEN_INPUT as it is."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
        orjson.dumps(value)  # nested deeper than can be written again
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {BROKEN_INPUT: text}
    return value if isinstance(value, dict) else {BROKEN_INPUT: text}


class MessageWriter:
    """Makes one message of the deltas of its job: as a whole, or event by event."""

    def __init__(
        self,
        *,
        message_id: str,
        model: str,
        thinking: Thinking,
        stops: Sequence[str],
        make_reader: Callable[[], OutputReader] | None,
    ) -> None:
        """Of one attempt.

        Args:
            message_id: of the reply.
            model: that was asked for.
            thinking: whether what the model thinks is told.
            stops: the request's stop sequences.
            make_reader: of the job.
        """
        self._id = message_id
        self._model = model
        self._stops = frozenset(stops)
        self._turn = Turn(make_reader)
        self._output = MessageOutput(thinking)
        self._has_begun = False

    def take(self, deltas: Sequence[Delta]) -> list[Object]:
        """What is told of the deltas, possibly nothing.

        Raises:
            InternalError: the turn ended twice or oddly.
        """
        told: list[Object] = []
        for event in self._turn.feed(deltas):
            told += self._output.add(event)
        return told

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none. The usage of the first one is not known yet: it is all zero."""
        told = self.take(deltas)
        if told and not self._has_begun:
            self._has_begun = True
            told.insert(0, {"type": "message_start", "message": self._message([], None, None, TokenUsage())})
        return b"".join(map(named_event, told))

    def end(self) -> bytes:
        """The events after the last delta.

        Raises:
            InternalError: the turn has not ended.
        """
        message = self.whole()
        told: list[Object] = []
        if not self._has_begun:
            told.append({"type": "message_start", "message": self._message([], None, None, TokenUsage())})
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        told.append({"type": "message_delta", "delta": delta, "usage": message["usage"]})
        told.append({"type": "message_stop"})
        return b"".join(map(named_event, told))

    def whole(self) -> Object:
        """The message, once all deltas have come.

        Raises:
            InternalError: the turn has not ended.
        """
        self._turn.check_finished()
        reason, sequence = self._stop()
        return self._message(self._output.content(), reason, sequence, self._turn.usage)

    def _stop(self) -> tuple[str, str | None]:
        turn = self._turn
        if turn.finish_reason == "length":
            return "max_tokens", None
        if turn.finish_reason == "tool_calls":
            return "tool_use", None
        if turn.stop_reason in self._stops:
            return "stop_sequence", turn.stop_reason
        return "end_turn", None

    def _message(self, content: list[Object], reason: str | None, sequence: str | None, usage: TokenUsage) -> Object:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"thinking_tokens": self._turn.reasoning_tokens},
                "service_tier": "standard",
            },
        }


def count_body(num_tokens: int) -> Object:
    """The reply of count_tokens."""
    return {"input_tokens": num_tokens}
