"""One reader's unread output: bounded, and written by one task while the other end may break or stall.

Used by both streaming calls. A stream that is not read for too long is ended, so that no router can make a worker grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from naru_proto.errors import Overloaded
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.resident import Visit
from naru_worker.adapters.server.gathering import Gathering
from naru_worker.adapters.server.vectors import VectorForm
from naru_worker.core.fair_order import Turn
from naru_worker.core.request import RequestId

MAX_ID_CHARS = 256
"""Of a request."""
MAX_UNREAD_BYTES = 1 << 29
"""Of vectors and tensors that a reader has not taken."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between its arrival and its last delta, as the server knows it."""

    wire_id: str
    """The client's name for it."""
    engine_id: RequestId
    """Ours: never used twice, so that a late delta cannot reach a namesake."""
    stream: DeltaStream
    arrived_s: float
    with_token_ids: bool
    model_name: str = ""
    """As it was asked for."""
    visit: Visit | None = None
    """Its stay at a model, once the model was known."""
    model: LoadedModel | None = None
    """None while it waits for it."""
    is_submitted: bool = False
    """The engine has it and will send its last delta."""
    early_tokens: int = 0
    """Of its prompt, about, until it is on its way to the engine."""
    is_cancelled: bool = False
    turn: Turn | None = None
    """Its place among the requests of its model."""
    timer: asyncio.TimerHandle | None = None
    """Ends it when its time is over."""
    num_choices: int = 1
    num_beams: int = 0
    """Of a beam search: all of them are computed, whatever is told of them."""
    """0: it has a task, and nothing is drawn."""
    gathering: Gathering | None = None
    """Its parts, where the engine has it in parts."""
    vector_form: VectorForm | None = None
    """Of the vectors or scores that it asked for."""
    untold_revision: str = ""
    """Of its model; the first delta tells it, to whom may want to go on elsewhere."""
    first_prompt_token_id: int | None = None
    """Nothing stands before it to score it by; it is told all the same, so that an echo is whole."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of its model, for log probabilities."""
        return b"" if self.model is None else self.model.tokens.token_bytes(token_id)


class DeltaStream:
    """Output for one reader, in order. Everything is called in the asyncio thread."""

    def __init__(self, max_unread: int) -> None:
        self._max_unread = max_unread
        self._pending: list[tuple[LiveRequest, SequenceDelta]] = []
        self._num_bytes = 0
        """Of vectors and tensors that are pending."""
        self._ready = asyncio.Event()
        self._overflowed = asyncio.Event()
        self.live: dict[str, LiveRequest] = {}
        """Requests whose last delta was not put here yet, by wire id."""
        self.counts: dict[str, int] = {}
        """How many of them ask for a model, by its name."""
        self.last_request_id = ""
        """Wire id of the newest request that came here; empty: none, or one too long to be taken."""
        self.is_closed = False
        """Nobody reads any more."""
        self.is_finishing = False
        """The worker leaves: the stream ends as soon as its requests have."""

    @property
    def has_more(self) -> bool:
        """Whether something is to be written, or will be."""
        return bool(self._pending or self.live)

    def add(self, request: LiveRequest) -> None:
        """A request that came here begins; its last delta ends it."""
        self.live[request.wire_id] = request
        self.counts[request.model_name] = self.counts.get(request.model_name, 0) + 1

    def note_id(self, wire_id: str) -> None:
        """A request has come here, taken or refused; ids that are refused for their length are not kept."""
        self.last_request_id = wire_id if len(wire_id) <= MAX_ID_CHARS else ""

    def clear(self) -> None:
        """Forgets all requests: nobody waits for their last deltas."""
        self.live.clear()
        self.counts.clear()

    def put(self, request: LiveRequest, delta: SequenceDelta) -> None:
        """Adds output; drops it when the stream is closed or full."""
        if delta.is_last and self.live.get(request.wire_id) is request:
            del self.live[request.wire_id]
            self._uncount(request.model_name)
        if self.is_closed or self._overflowed.is_set():
            return
        self._num_bytes += 0 if delta.output is None else delta.output.num_bytes
        if len(self._pending) >= self._max_unread or self._num_bytes > MAX_UNREAD_BYTES:
            self._pending.clear()
            self._overflowed.set()
            return
        self._pending.append((request, delta))
        self._ready.set()

    def wake(self) -> None:
        """Lets the writer look again, for an end without output."""
        self._ready.set()

    def finish(self) -> None:
        """Ends the stream once its requests have ended and all is written."""
        self.is_finishing = True
        self.wake()

    async def take(self) -> list[tuple[LiveRequest, SequenceDelta]]:
        """All unread output, after waiting for some; empty when only woken."""
        await self._ready.wait()
        return self.take_now()

    def take_now(self) -> list[tuple[LiveRequest, SequenceDelta]]:
        """All unread output, if any."""
        self._ready.clear()
        taken, self._pending, self._num_bytes = self._pending, [], 0
        return taken

    async def run(self, write: Callable[[], Awaitable[None]]) -> None:
        """Runs the writer until it is done.

        Raises:
            Overloaded: the reader does not read.
        """
        writer = asyncio.ensure_future(write())
        overflow = asyncio.ensure_future(self._overflowed.wait())
        try:
            await asyncio.wait((writer, overflow), return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                raise Overloaded(
                    f"more than {self._max_unread} deltas, or {MAX_UNREAD_BYTES >> 20} MiB of vectors and tensors, "
                    "were not read; read faster or send less at once"
                )
            writer.result()
        finally:
            for task in (writer, overflow):
                task.cancel()
            await asyncio.gather(writer, overflow, return_exceptions=True)

    def _uncount(self, model: str) -> None:
        if self.counts[model] > 1:
            self.counts[model] -= 1
        else:
            del self.counts[model]
