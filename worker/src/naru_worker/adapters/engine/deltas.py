"""What the engine thread hands to the asyncio thread: plain values, no protobuf.

Messages are made from them on the other side, so that this work overlaps with the engine's native step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.task_output import TaskOutput
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.core.request import FinishReason, RequestId
from naru_worker.core.step import PositionLogprobs


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of a whole request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class SequenceDelta:
    """New output of one sequence. The last one of a request has `is_last`, with usage or an error, exactly once."""

    request_id: RequestId
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    cached_tokens: int = 0
    """On the first delta of the request."""
    usage: UsageCounts | None = None
    error: NaruError | None = None
    is_last: bool = False
    is_first: bool = False
    """Of its choice."""
    vector: FloatArray | None = None
    """Of the last prompt token, after the final norm, where it was asked for; on the last delta."""
    output: TaskOutput | None = None
    """Of a request with a task."""


Outbox: TypeAlias = list[SequenceDelta]
"""Deltas of one turn of the loop, in the order they came to be; handed over as a whole."""
