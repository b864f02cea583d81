"""When output leaves the engine: at once, or together with that of the next steps.

Used by the engine loop. A frame costs worker and router as much for five tokens as for one, on cores that the engine
wants too, and nobody reads tokens one by one at 250 a second. So they wait, for `interval_s` at most, while the next
ones are sure to come within that time. The first token of a choice, ends and errors never wait.
"""

from __future__ import annotations

from collections.abc import Callable

from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.core.request import RequestId

MAX_TOKENS = 64
"""Of one delta, about: frames are cut between deltas, never inside one."""


class OutputPace:
    """Decides for one engine loop. `clock` is the loop's."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        """`interval_s`: longest wait of a token; 0: none waits."""
        self._interval_s = interval_s
        self._clock = clock
        self._sent_s = float("-inf")

    def may_wait(self, outbox: Outbox, step_s: float) -> bool:
        """Whether all of it may wait for the next step, which will take about `step_s`."""
        if self._clock() + step_s > self._sent_s + self._interval_s:
            return False
        return not any(_is_urgent(delta) for delta in outbox)

    def sent(self) -> None:
        """Output has left."""
        self._sent_s = self._clock()


def merged(outbox: Outbox) -> Outbox:
    """The same output with one delta for each choice, where that can be; the first one of each takes up the later."""
    if len(outbox) < 2:
        return list(outbox)
    kept: dict[tuple[RequestId, int], SequenceDelta] = {}
    newest: dict[RequestId, SequenceDelta] = {}
    result: Outbox = []
    for delta in outbox:
        key = (delta.request_id, delta.index)
        first = kept.get(key)
        # What ends a request stays behind all that its other choices have said.
        is_apart = delta.is_last and newest.get(delta.request_id) is not first
        if first is None or is_apart or not _can_join(first, delta):
            kept[key] = newest[delta.request_id] = delta
            result.append(delta)
            continue
        first.text += delta.text
        first.token_ids += delta.token_ids
        first.logprobs += delta.logprobs
        first.finish_reason, first.stop_reason = delta.finish_reason, delta.stop_reason
        first.is_last, first.usage = delta.is_last, delta.usage
    return result


def _can_join(first: SequenceDelta, delta: SequenceDelta) -> bool:
    """Whether what one says beside tokens leaves room for the other's."""
    is_plain = delta.error is None and delta.output is None and delta.vector is None and not delta.prompt_logprobs
    return is_plain and first.finish_reason is None and len(first.token_ids) < MAX_TOKENS


def _is_urgent(delta: SequenceDelta) -> bool:
    return delta.is_first or delta.is_last or delta.finish_reason is not None or delta.output is not None
