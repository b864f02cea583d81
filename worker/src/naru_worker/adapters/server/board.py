"""Requests alive on this worker: from a message to the engine, and from the engine's deltas to the right stream.

A request for a model that is not loaded is held here while the hub brings the model up. Requests of one priority are
served in the order that shares a model fairly among tenants, held ones and those in the engine alike. One whose time is
over is ended wherever it is.

Lives in the asyncio thread. Every accepted message ends in exactly one last delta on its stream, unless the stream
itself is closed; then its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NaruError,
    Overloaded,
    Unavailable,
)
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.resident import Visit
from naru_worker.adapters.server import wire
from naru_worker.adapters.server.admission import Admission
from naru_worker.adapters.server.gathering import owner_id
from naru_worker.adapters.server.keeper import Asked
from naru_worker.adapters.server.stream import DeltaStream, LiveRequest
from naru_worker.adapters.server.tasks import Tasks
from naru_worker.adapters.server.terms import Terms, terms_of
from naru_worker.core.fair_order import FairOrder
from naru_worker.core.request import FinishReason, RequestId


class Models(Protocol):
    """Where the board finds models."""

    def arrive(self, name: str) -> tuple[Visit, LoadedModel | None]:
        """A request has come; None: it has to wait for the model.

        Raises:
            ModelNotFound: unknown here.
            Unavailable: the worker takes no more requests.
        """

    def leave(self, visit: Visit) -> None:
        """A request has ended."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that waits for its model."""

    live: LiveRequest
    asked: Asked
    timer: asyncio.TimerHandle

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is sooner."""
        return self.asked.message.priority, self.asked.turn.number


class RequestBoard:
    """All live requests. Not thread-safe: asyncio thread only."""

    def __init__(
        self,
        loop: EngineLoop,
        models: Models,
        *,
        max_num_requests: int,
        max_message_bytes: int,
        hold_timeout_s: float,
    ) -> None:
        """`hold_timeout_s`: a request waits no longer than this for its model."""
        self._loop = loop
        self._models = models
        self._max_num_requests = max_num_requests
        self._hold_timeout_s = hold_timeout_s
        self._held: dict[str, dict[RequestId, _Held]] = {}
        """By model, oldest first."""
        self._live: dict[RequestId, LiveRequest] = {}
        self._wire_ids: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._order = FairOrder()
        self.early_tokens: Counter[str] = Counter()
        """Prompt tokens, about, of requests that are not on their way to an engine yet, by model."""
        self._admission = Admission(loop, self, max_message_bytes)
        self._tasks = Tasks(loop, self, max_message_bytes)
        self._ended = asyncio.Event()
        """Set, and replaced by a fresh one, whenever a request has ended."""
        self._death: NaruError | None = None

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def accept(self, message: worker_pb2.GenerateRequest, stream: DeltaStream) -> None:
        """Takes a request; whatever comes of it goes to `stream`. Never raises."""
        live = LiveRequest(
            wire_id=message.request_id,
            engine_id=RequestId(str(next(self._ids))),
            stream=stream,
            arrived_s=self._loop.now_s(),
            with_token_ids=message.return_token_ids,
            model_name=message.model,
        )
        if message.request_id in self._wire_ids:
            error = InvalidRequest(
                f"request_id {message.request_id!r} is in use by a request that still runs; send a fresh one",
                param="request_id",
            )
            stream.put(live, SequenceDelta(live.engine_id, error=error, is_last=True))
            return
        self._live[live.engine_id] = live
        self._wire_ids[live.wire_id] = live
        stream.add(live)
        try:
            self._start(live, message)
        except NaruError as error:
            self.end(live, error)

    def cancel(self, wire_ids: Iterable[str], stream: DeltaStream | None = None) -> int:
        """Ends the requests named, of one stream or of all; unknown ones are ignored. Returns how many there were."""
        known = self._wire_ids if stream is None else stream.live
        found = [live for wire_id in wire_ids if (live := known.get(wire_id)) is not None and not live.is_cancelled]
        for live in found:
            self._cancel(live, None)
        return len(found)

    def close(self, stream: DeltaStream) -> None:
        """Forgets a broken or finished stream: its requests are cancelled, their ids are free at once."""
        stream.is_closed = True
        for live in tuple(stream.live.values()):
            self._wire_ids.pop(live.wire_id, None)
            self._cancel(live, None)
        stream.clear()

    def of_model(self, model: LoadedModel) -> list[LiveRequest]:
        """Live requests of one model."""
        return [live for live in self._live.values() if live.model is model]

    def fail(self, requests: Iterable[LiveRequest], error: NaruError) -> None:
        """Ends requests with an error, through the engine where it has them."""
        for live in tuple(requests):
            self._cancel(live, error)

    async def wait_idle(self, model: LoadedModel | None, timeout_s: float | None) -> bool:
        """Waits until no request (of the model) is left. False: time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._live if model is None else self.of_model(model):
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, model: LoadedModel, timeout_s: float | None) -> None:
        """Waits until a model has no requests, and ends those that take longer (None: lets them)."""
        if not await self.wait_idle(model, timeout_s):
            self.fail(self.of_model(model), Unavailable(f"model {model.name!r} was unloaded; ask again"))
            while self.of_model(model):
                await self._ended.wait()

    def dispatch(self, outbox: Outbox) -> None:
        """Hands the engine's output of one turn to its streams."""
        for part in outbox:
            live, delta = self._live.get(part.request_id), part
            if live is None:
                live = self._live.get(owner_id(part.request_id))
                whole = None if live is None else self._tasks.take(live, part)
                if live is None or whole is None:
                    continue
                delta = whole
            self._hand_over(live, delta)

    def engine_died(self, error: NaruError) -> None:
        """Ends everything: the engine will say nothing any more, nor take anything."""
        self._death = error
        for live in tuple(self._live.values()):
            self.end(live, error)

    def _start(self, live: LiveRequest, message: worker_pb2.GenerateRequest) -> None:
        if self._death is not None:
            raise self._death
        if len(self._live) > self._max_num_requests:
            raise Overloaded(f"this worker has {self._max_num_requests} requests already; ask again later")
        wire.check_request(message)
        params = wire.sampling_from_wire(message.sampling)
        terms = terms_of(message, params)
        live.num_choices = params.n if message.WhichOneof("task") is None else 0
        live.num_beams = params.beam_width or 0
        live.visit, model = self._models.arrive(message.model)
        if live.engine_id not in self._live:
            return  # it was rejected at once
        self._set_early(live, terms.work.prompt_tokens)
        turn = live.turn = self._order.enter(message.model, message.priority, terms.tenant, terms.weight, terms.work)
        if terms.timeout_s:
            live.timer = asyncio.get_running_loop().call_later(terms.timeout_s, self._run_out, live, terms)
        asked = Asked(message, turn, params)
        if model is not None:
            self._admit(live, model, asked)
        else:
            timer = asyncio.get_running_loop().call_later(self._hold_timeout_s, self._expire, live)
            self._held.setdefault(message.model, {})[live.engine_id] = _Held(live, asked, timer)

    def start_held(self, model: LoadedModel) -> None:
        """The model takes requests now: those that wait for it go, the most urgent first, tenants taking turns."""
        for held in sorted(self._held.pop(model.name, {}).values(), key=lambda held: held.rank):
            held.timer.cancel()
            try:
                self._admit(held.live, model, held.asked)
            except NaruError as error:
                self.end(held.live, error)

    def reject_held(self, model: str, error: NaruError) -> None:
        """The model will not come up: those that wait for it end."""
        waiting = [live for live in self._live.values() if live.visit is not None and live.visit.model == model]
        for live in waiting:
            if live.model is None:
                self.end(live, error)

    def num_held(self, model: str) -> int:
        """Requests that wait for a model."""
        return len(self._held.get(model, ()))

    def _expire(self, live: LiveRequest) -> None:
        assert live.visit is not None
        self.end(
            live,
            Unavailable(
                f"model {live.visit.model!r} did not come up within {self._hold_timeout_s:g} s; ask again later",
                param="model",
            ),
        )

    def _run_out(self, live: LiveRequest, terms: Terms) -> None:
        """The caller's time is over: held, waiting or running, it ends before the engine's next step."""
        error = DeadlineExceeded(
            f"the request was not done within the {terms.timeout_s:.3g} s that it had; give it more time"
        )
        if not live.is_cancelled:
            self._cancel(live, error)

    def _settle(self, live: LiveRequest, delta: SequenceDelta) -> None:
        """Has its tenant charged for what the request took in the engine."""
        usage = delta.usage
        if usage is None or live.turn is None or not (live.num_choices or usage.prompt_tokens):
            return  # it ended early, or is not counted in tokens: the estimate stands
        output_tokens = usage.completion_tokens // live.num_choices if live.num_choices else None
        computed = usage.prompt_tokens - usage.cached_tokens
        computed += usage.completion_tokens if not live.num_beams else (output_tokens or 0) * live.num_beams
        self._order.end(live.turn, computed, output_tokens)

    # --- what the ways into the engine need (see `Keeper`) ------------------------------------------------------

    def is_open(self, live: LiveRequest) -> bool:
        """Whether it has neither ended nor been cancelled."""
        return live.engine_id in self._live and not live.is_cancelled

    def is_submitted(self, live: LiveRequest) -> None:
        """The engine will send its last delta."""
        live.is_submitted = True
        self._set_early(live, 0)

    def end(self, live: LiveRequest, error: NaruError | None) -> None:
        """Ends a request that the engine does not have."""
        reason = FinishReason.CANCELLED if error is None else None
        self.finish(live, SequenceDelta(live.engine_id, finish_reason=reason, error=error, is_last=True))

    def finish(self, live: LiveRequest, delta: SequenceDelta) -> None:
        """Ends a request that needed no engine with its answer."""
        if live.engine_id in self._live:
            self._hand_over(live, delta)

    def _admit(self, live: LiveRequest, model: LoadedModel, asked: Asked) -> None:
        live.model = model
        way = self._tasks if asked.message.WhichOneof("task") else self._admission
        way.admit(live, model, asked)

    def _hand_over(self, live: LiveRequest, delta: SequenceDelta) -> None:
        if live.turn is not None and not live.turn.is_begun and _is_served(delta):
            self._order.begin(live.turn)
        if delta.is_last:
            self._settle(live, delta)
            self._forget(live)
        for piece in (delta,) if delta.output is None else self._tasks.pieces(live, delta):
            live.stream.put(live, piece)

    def _cancel(self, live: LiveRequest, error: NaruError | None) -> None:
        """A request the engine has ends by the engine's word, so that its blocks are back by then."""
        live.is_cancelled = True
        if live.is_submitted and self._death is None:
            self._tasks.cancel(live, error)
        else:
            self.end(live, error)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.engine_id]
        self._set_early(live, 0)
        if self._wire_ids.get(live.wire_id) is live:
            del self._wire_ids[live.wire_id]
        if live.timer is not None:
            live.timer.cancel()
        if live.turn is not None:
            self._order.end(live.turn)
        if live.visit is not None:
            held = self._held.get(live.visit.model, {}).pop(live.engine_id, None)
            if held is not None:
                held.timer.cancel()
            self._models.leave(live.visit)
        self._ended.set()
        self._ended = asyncio.Event()

    def _set_early(self, live: LiveRequest, num_tokens: int) -> None:
        self.early_tokens[live.model_name] += num_tokens - live.early_tokens
        live.early_tokens = num_tokens
        if not self.early_tokens[live.model_name]:
            del self.early_tokens[live.model_name]

    def __iter__(self) -> Iterator[LiveRequest]:
        """Live requests, oldest first."""
        return iter(tuple(self._live.values()))


def _is_served(delta: SequenceDelta) -> bool:
    """Whether the engine has computed something for the request; not where it only ended it."""
    return bool(delta.token_ids) or delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
