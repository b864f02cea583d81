"""The output side of one request in the engine: text of each choice, usage, and which delta is the last.

Used by the engine, in its thread.
"""

from __future__ import annotations

from typing import cast

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import SequenceDelta, UsageCounts
from naru_worker.adapters.engine.token_table import TokenTable
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.core.output_text import OutputStream
from naru_worker.core.request import FinishReason, Request
from naru_worker.core.step import SequenceOutput
from naru_worker.core.stop_strings import StopStrings


class RequestOutput:
    """Turns what the scheduler commits for one request into deltas."""

    __slots__ = ("_num_open", "_streams", "arrived_s", "error", "is_begun", "last_token_s", "request")

    def __init__(self, request: Request, arrived_s: float, tokens: TokenTable) -> None:
        """Takes up prior output where there is some.

        Raises:
            InvalidRequest: a stop string is in it.
        """
        params = request.params
        stops = StopStrings(params.stop)
        self.request = request
        self.arrived_s = arrived_s
        self.error: NaruError | None = None
        """Ends the request with it: set before its sequences are ended."""
        self.is_begun = False
        """A delta was made."""
        self.last_token_s = [0.0] * params.n
        """When each choice gained its newest token; 0 before the first."""
        shows = request.show_special_tokens
        self._streams = [
            OutputStream(tokens, stops, min_tokens=params.min_tokens, show_special_tokens=shows)
            for _ in request.sequences
        ]
        for stream, prior in zip(self._streams, request.prior, strict=False):
            stream.resume(prior.token_ids, is_finished=prior.is_finished)
        self._num_open = sum(not prior.is_finished for prior in request.prior) if request.prior else params.n

    def new_stream(self) -> OutputStream:
        """A stream as each choice has one, before any output."""
        return self._streams[0].fork()

    @property
    def is_done(self) -> bool:
        """The last delta was made."""
        return self._num_open == 0

    def push(self, output: SequenceOutput) -> SequenceDelta:
        """The delta of one sequence; see `is_stopped_by_text` for what the scheduler is to be told."""
        sequence = output.sequence
        text = self._streams[sequence.index].push(output)
        count = text.num_tokens
        delta = SequenceDelta(
            self.request.request_id,
            sequence.index,
            text.text,
            output.new_token_ids[:count],
            text.finish_reason,
            text.stop_reason,
            output.logprobs[:count],
            output.prompt_logprobs,
        )
        delta.vector = cast(FloatArray | None, output.hidden)
        if not self.is_begun:
            self.is_begun = True
            delta.cached_tokens = self.request.num_cached_tokens
        if text.finish_reason is not None:
            self._close(delta)
        return delta

    def fail(self, error: NaruError) -> SequenceDelta:
        """The last delta of a request that ends with an error, whatever is still open."""
        self._num_open = 0
        return SequenceDelta(self.request.request_id, error=error, is_last=True)

    def usage(self) -> UsageCounts:
        """Tokens so far; the prompt counts once."""
        return UsageCounts(
            len(self.request.prompt_token_ids),
            sum(stream.num_tokens for stream in self._streams),
            self.request.num_cached_tokens,
        )

    def _close(self, delta: SequenceDelta) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            delta.is_last = True
            delta.usage = self.usage()


def is_stopped_by_text(output: SequenceOutput, delta: SequenceDelta) -> bool:
    """Whether the sequence goes on as far as the scheduler knows, and must be ended there."""
    return delta.finish_reason is FinishReason.STOP and output.finish_reason is None
