"""The parts of one request that its engine computes as requests of their own: what a decoder is asked for vectors.

Kept with the live request; fed by the board with the parts' last deltas.
"""

from __future__ import annotations

from naru_proto.errors import InternalError, NaruError
from naru_worker.adapters.engine.deltas import SequenceDelta, UsageCounts
from naru_worker.adapters.engine.task_output import TaskOutput, Vector
from naru_worker.core.request import FinishReason, RequestId


def part_id(request_id: RequestId, index: int) -> RequestId:
    """A part's own name; `owner_id` leads back."""
    return RequestId(f"{request_id}.{index}")


def owner_id(request_id: RequestId) -> RequestId:
    """The request that a part belongs to."""
    return RequestId(request_id.partition(".")[0])


class Gathering:
    """Mutable. Done when every part has ended, however it did."""

    def __init__(self, request_id: RequestId, num_parts: int) -> None:
        self.left = {part_id(request_id, index): index for index in range(num_parts)}
        """Parts that have not ended, and their places."""
        self.error: NaruError | None = None
        """The first one's that failed."""
        self._request_id = request_id
        self._is_cancelled = False
        self._vectors: list[Vector] = []
        self._usage = UsageCounts(0, 0, 0)

    def take(self, part: SequenceDelta) -> SequenceDelta | None:
        """Adds the end of a part; the last delta of the whole request once all have ended."""
        index = self.left.pop(part.request_id, None) if part.is_last else None
        if index is None:
            return None
        if part.error is not None:
            self.error = self.error or part.error
        elif part.vector is None or part.usage is None:
            self._is_cancelled |= part.finish_reason is FinishReason.CANCELLED
            if not self._is_cancelled:
                self.error = self.error or InternalError("the model gave no vector for an input; ask again")
        else:
            sums, usage = self._usage, part.usage
            self._usage = UsageCounts(
                sums.prompt_tokens + usage.prompt_tokens, 0, sums.cached_tokens + usage.cached_tokens
            )
            self._vectors.append(Vector(index, part.vector, usage.prompt_tokens))
        return None if self.left else self._whole()

    def _whole(self) -> SequenceDelta:
        if self.error is not None:
            return SequenceDelta(self._request_id, error=self.error, is_last=True)
        if self._is_cancelled:
            return SequenceDelta(self._request_id, finish_reason=FinishReason.CANCELLED, is_last=True)
        return SequenceDelta(
            self._request_id,
            finish_reason=FinishReason.STOP,
            usage=self._usage,
            is_last=True,
            output=TaskOutput(vectors=tuple(sorted(self._vectors, key=lambda vector: vector.index))),
        )
