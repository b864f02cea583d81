"""Events of `generate_stream`: the text as it comes, and why it ended. Fed by the request's life; does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.errors import InternalError
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.finish import finish_name
from naru_router.core.oip.kinds import VERSION
from naru_router.core.sse import dump, event
from naru_router.core.usage import TokenUsage


def reply_head(model: str, call_id: str) -> dict[str, object]:
    """What every reply and event begins with."""
    head: dict[str, object] = {"model_name": model, "model_version": VERSION}
    return {**head, "id": call_id} if call_id else head


def reply_end(text: str, reason: str, usage: TokenUsage) -> dict[str, object]:
    """What a whole reply, or the last event of a stream, ends with."""
    tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {"text_output": text, "finish_reason": reason, **tokens}


class GenerateChunks:
    """Writes the events of one prompt; the last one has an empty text, a finish reason and token counts."""

    def __init__(self, *, model: str, call_id: str, prompt: str) -> None:
        """`prompt`: begins the text; empty where it is not asked for."""
        self._head = reply_head(model, call_id)
        self._prompt = prompt
        self._reason = ""
        self.usage = TokenUsage()
        """Set by the last delta."""

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none.

        Raises:
            InternalError: the answer ended twice or oddly.
        """
        texts = []
        for delta in deltas:
            if delta.text:
                texts.append(delta.text)
            if delta.finish_reason:
                if self._reason:
                    raise InternalError("the worker ended a choice twice; send the request again")
                self._reason = finish_name(delta.finish_reason)
            if delta.HasField("usage"):
                self.usage = TokenUsage.from_wire(delta.usage)
        text = "".join(texts)
        if text and self._prompt:
            text, self._prompt = self._prompt + text, ""
        return event(dump({**self._head, "text_output": text})) if text else b""

    def end(self) -> bytes:
        """The last event.

        Raises:
            InternalError: the answer has not finished.
        """
        if not self._reason:
            raise InternalError("the worker ended the request before all of its choices; send it again")
        return event(dump({**self._head, **reply_end(self._prompt, self._reason, self.usage)}))
