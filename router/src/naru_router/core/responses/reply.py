"""Responses: the object that a call comes to, and the events of its stream, each with its number. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from naru_proto.errors import NaruError
from naru_proto.v1.worker_pb2 import Delta
from naru_router.core.chat_parts import OutputReader
from naru_router.core.errors import error_body, error_shape
from naru_router.core.named_events import named_event
from naru_router.core.responses.output import Object, OutputItems
from naru_router.core.responses.request import ResponseCall
from naru_router.core.turn import Turn


class ResponseWriter:
    """Makes one response of the deltas of its job: as a whole, or event by event."""

    def __init__(
        self,
        call: ResponseCall,
        *,
        answer_id: str,
        created_s: int,
        make_reader: Callable[[], OutputReader] | None,
    ) -> None:
        """Of one attempt.

        Args:
            call: that is answered.
            answer_id: makes the ids of the response and its items.
            created_s: Unix seconds.
            make_reader: of the job.
        """
        self._call = call
        self._id = f"resp_{answer_id}"
        self._created_s = created_s
        self._turn = Turn(make_reader)
        self._output = OutputItems(answer_id, has_logprobs=call.has_logprobs)
        self._num_told = 0

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
        """The events of the deltas, possibly none."""
        told = self.take(deltas)
        if told and not self._num_told:
            told[:0] = self._beginning()
        return self._events(told)

    def whole(self, completed_s: int) -> Object:
        """The response, once all deltas have come.

        Raises:
            InternalError: the turn has not ended.
        """
        self._turn.check_finished()
        output = self._output.items()
        if self._turn.finish_reason == "length":
            return self._response("incomplete", output, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", output, completed_at=completed_s)

    def end(self, response: Object) -> bytes:
        """The last event: the response, as `whole` made it."""
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def fail(self, error: NaruError) -> bytes:
        """The last events of a stream that failed after it had begun: an error, and the response as a failed one."""
        message = error.message.encode("utf-8", "replace").decode("utf-8")
        told: list[Object] = [
            {"type": "error", "code": error.code, "message": message, "param": error.param or None},
        ]
        if self._num_told:  # else there is no response that could fail
            failed = self._response(
                "failed", self._output.items(), error={"code": _failure_code(error), "message": message}
            )
            told.append({"type": "response.failed", "response": failed})
        return self._events(told)

    def _beginning(self) -> list[Object]:
        response = self._response("in_progress", [])
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _events(self, told: Sequence[Object]) -> bytes:
        made = []
        for event in told:
            made.append(named_event({**event, "sequence_number": self._num_told}))
            self._num_told += 1
        return b"".join(made)

    def _response(self, status: str, output: list[Object], **more: object) -> Object:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._call.model,
            "output": output,
            "service_tier": "default",
            "usage": None if status in ("in_progress", "failed") else self._usage(),
            **self._call.told,
            **more,
        }

    def _usage(self) -> Object:
        usage = self._turn.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._turn.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class ResponseErrors:
    """OpenAI's errors; those of a stream go on with its numbers."""

    def __init__(self, writer: Callable[[], ResponseWriter]) -> None:
        """`writer`: of the attempt that the client sees."""
        self._writer = writer

    def body(self, error: NaruError) -> bytes:
        """JSON of a whole reply."""
        return error_body(error)

    def event(self, error: NaruError) -> bytes:
        """Events that end the stream; no client takes them for success."""
        return self._writer().fail(error)


def _failure_code(error: NaruError) -> str:
    """One of the codes that a failed response may have."""
    status = error_shape(error).status
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if status < 500 else "server_error"
