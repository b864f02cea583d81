"""The output items of a response as they come of a turn, and the events of each. Pure.

One object makes both, so that the items of a stream are those of a whole reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.v1.inference_pb2 import PositionLogprobs
from naru_router.core.chat_parts import ChoiceEvent, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.logprobs import chat_content

Object = dict[str, object]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class OutputItems:
    """Mutable. An item is open while more of it may come; at most one is, the last one."""

    def __init__(self, answer_id: str, *, has_logprobs: bool) -> None:
        """`answer_id` makes the ids of the items."""
        self._answer_id = answer_id
        self._has_logprobs = has_logprobs
        self._items: list[Object] = []
        self._kind = ""
        """Type of the open item; empty: none is."""
        self._texts: list[str] = []
        """Of the open item."""
        self._logprobs: list[Object] = []

    def items(self) -> list[Object]:
        """As they stand; whole once the turn has ended."""
        return list(self._items)

    def add(self, event: ChoiceEvent) -> list[Object]:
        """What is told of something new, without sequence numbers."""
        told: list[Object] = []
        part = event.part
        if isinstance(part, TextPart):
            self._begin("message", {}, told)
            self._say(part.text, event.logprobs, told)
        elif isinstance(part, ReasoningPart):
            self._begin("reasoning", {}, told)
            self._texts.append(part.text)
            told.append({"type": "response.reasoning_text.delta", **self._place(), "delta": part.text})
        elif isinstance(part, ToolCallPart):
            self._call(part, told)
        if event.finish_reason:
            self._finish(event, told)
        return told

    def _say(self, text: str, positions: Sequence[PositionLogprobs], told: list[Object]) -> None:
        logprobs = chat_content(positions) if self._has_logprobs else []
        self._texts.append(text)
        self._logprobs += logprobs
        told.append({"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": logprobs})

    def _call(self, part: ToolCallPart, told: list[Object]) -> None:
        if part.call_id:
            self._close("completed", told)
            self._begin("function_call", {"call_id": part.call_id, "name": part.name, "arguments": ""}, told)
        if part.arguments:
            self._texts.append(part.arguments)
            place = self._place(is_part=False)
            told.append({"type": "response.function_call_arguments.delta", **place, "delta": part.arguments})

    def _finish(self, event: ChoiceEvent, told: list[Object]) -> None:
        if not self._items:
            self._begin("message", {}, told)  # clients look for the text of an answer that is empty, too
        if self._kind == "message" and self._has_logprobs:
            # Tokens whose text never comes: a stop string, the end of the sequence.
            self._logprobs += chat_content(event.logprobs)
        self._close("incomplete" if event.finish_reason == "length" else "completed", told)

    def _begin(self, kind: str, more: Object, told: list[Object]) -> None:
        if self._kind == kind:
            return
        self._close("completed", told)
        self._kind = kind
        item: Object = {"id": f"{_PREFIXES[kind]}_{self._answer_id}_{len(self._items)}", "type": kind}
        item |= {"status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        told.append({"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": dict(item)})
        if kind in _EVENTS:
            told.append({"type": "response.content_part.added", **self._place(), "part": self._part("", [])})

    def _close(self, status: str, told: list[Object]) -> None:
        kind = self._kind
        if not kind:
            return
        item, text, logprobs = self._items[-1], "".join(self._texts), self._logprobs
        item["status"] = status
        if kind in _EVENTS:
            part = self._part(text, logprobs)
            item["content"] = [part]
            extra: Object = {"logprobs": logprobs} if kind == "message" else {}
            told.append({"type": f"{_EVENTS[kind]}.done", **self._place(), "text": text, **extra})
            told.append({"type": "response.content_part.done", **self._place(), "part": part})
        else:
            item["arguments"] = text
            place = self._place(is_part=False)
            told.append({"type": "response.function_call_arguments.done", **place, "arguments": text})
        told.append({"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": dict(item)})
        self._kind, self._texts, self._logprobs = "", [], []

    def _part(self, text: str, logprobs: list[Object]) -> Object:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _place(self, *, is_part: bool = True) -> Object:
        place: Object = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return {**place, "content_index": 0} if is_part else place
