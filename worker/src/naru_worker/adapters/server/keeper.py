"""What the ways into the engine need of the board, and work for a request in another thread. Asyncio thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from naru_proto.errors import InternalError, NaruError
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.server.stream import LiveRequest
from naru_worker.core.fair_order import Turn
from naru_worker.core.sampling import SamplingParams

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

INLINE_CHARS = 1024
"""Shorter texts are tokenized at once: half a millisecond, less than a hop to another thread under load."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it waits for its model: what was asked, checked, and whose turn it is."""

    message: worker_pb2.GenerateRequest
    turn: Turn
    params: SamplingParams


class Keeper(Protocol):
    """Keeps the live requests: the board."""

    def is_open(self, live: LiveRequest) -> bool:
        """Whether it has neither ended nor been cancelled."""

    def is_submitted(self, live: LiveRequest) -> None:
        """The engine will send its last delta."""

    def end(self, live: LiveRequest, error: NaruError | None) -> None:
        """Ends a request that the engine does not have."""

    def finish(self, live: LiveRequest, delta: SequenceDelta) -> None:
        """Ends a request that needed no engine with its answer."""


class Aside:
    """Work in other threads, and what follows in this one while the request is still wanted."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self, live: LiveRequest, work: Callable[[], _T], then: Callable[[_T], None], what: str, *, inline: bool
    ) -> None:
        """`then(work())`; with `inline` now, and errors of ours are raised; else later, and they end the request.

        `what` could not be done, in the words for an error that is none of ours.
        """
        if inline:
            then(work())
            return
        self.start(live, asyncio.to_thread(work), then, what)

    def start(
        self, live: LiveRequest, work: Coroutine[object, object, _T], then: Callable[[_T], None], what: str
    ) -> None:
        """The same with work that waits for others: later, and errors end the request."""
        task = asyncio.create_task(self._run(live, work, then, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, live: LiveRequest, work: Coroutine[object, object, _T], then: Callable[[_T], None], what: str
    ) -> None:
        try:
            result = await work
            if self._keeper.is_open(live):
                then(result)
        except NaruError as error:
            self._keeper.end(live, error)
        except Exception as exc:
            # The top of a task: a request whose text breaks the tokenizer must still end.
            _log.error("work for a request of %s failed: %s", live.model_name, what, exc_info=exc)
            self._keeper.end(live, InternalError(f"{what} ({type(exc).__name__})"))
