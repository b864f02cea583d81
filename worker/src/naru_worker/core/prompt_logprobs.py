"""Collects the prompt logprobs of requests that asked, chunk by chunk, until the prompt is computed.

Used by the scheduler. A preempted prompt is computed again; each position is kept once.
"""

from __future__ import annotations

from naru_worker.core.request import Request, RequestId, Sequence
from naru_worker.core.step import PositionLogprobs, Row, RowResult


class PromptLogprobs:
    """Per request: item p is of prompt token p. Only a request's first sequence has any."""

    def __init__(self) -> None:
        self._items: dict[RequestId, list[PositionLogprobs]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def open(self, request: Request) -> None:
        """Starts collecting, if the request asked. No logits precede the first token, so its item is empty."""
        if request.params.prompt_logprobs is not None:
            self._items[request.request_id] = [PositionLogprobs(None)]

    def is_open(self, sequence: Sequence) -> bool:
        """Whether this sequence still owes prompt logprobs."""
        return sequence.index == 0 and sequence.request.request_id in self._items

    def collect(self, row: Row, result: RowResult) -> None:
        """Keeps what a computed row adds: its results start with prompt token ``row.start + 1``."""
        if self.is_open(row.sequence):
            kept = self._items[row.sequence.request.request_id]
            kept.extend(result.prompt_logprobs[max(0, len(kept) - row.start - 1) :])

    def take(self, sequence: Sequence) -> tuple[PositionLogprobs, ...]:
        """Everything collected, once."""
        return tuple(self._items.pop(sequence.request.request_id)) if self.is_open(sequence) else ()

    def close(self, request: Request) -> None:
        """Drops what was not taken."""
        self._items.pop(request.request_id, None)
