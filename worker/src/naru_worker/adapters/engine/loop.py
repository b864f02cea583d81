"""The engine thread: owns every loaded model's engine, and is the only one to touch them.

Other threads post commands; the asyncio thread gets each step's output in one call. Idle means blocked on the queue,
not spinning. Models with work share the thread's time by deficit round robin (`core.turns`), a step at a time.

    commands ──► queue ──► [engine thread: commands, step, publish, commands, step, …] ──► asyncio thread
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import Outbox
from naru_worker.adapters.engine.key_news import KeyNews
from naru_worker.adapters.engine.output_pace import OutputPace, merged
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.adapters.memory.kv_space import KVReclaimer, KVSpace
from naru_worker.adapters.ops.protocol import DeviceFault
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.request import Request, RequestId
from naru_worker.core.turns import Contender, Turns


class SteppedEngine(Protocol):
    """One model, as the loop sees it. Every method is called in the engine thread; `stats` may be read from any."""

    stats: EngineStats
    kv_space: KVSpace | None
    """Its KV memory, where that grows and shrinks."""
    key_news: KeyNews
    """Route keys that its prefix cache has gained and lost. May be taken from any thread."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything now."""

    @property
    def wake_s(self) -> float | None:
        """When a step may do something though none would now; None: not before a command comes."""

    @property
    def kv_committed_bytes(self) -> int:
        """Bytes of its KV cache now. May be read from any thread."""

    def queue_age_s(self) -> float:
        """How long the first of its waiting requests has been there; 0: none waits."""

    def trim_kv(self, num_bytes: int) -> int:
        """Gives up cached prefixes until so many bytes have come back; returns how many did."""

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        """Takes a request that came in at `arrived_s`; what is wrong with it becomes its last delta."""

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        """Ends a request, as cancelled or with `error`; an unknown or finished one is ignored."""

    def step(self, outbox: Outbox, *, is_alone: bool = True, before_long: Callable[[], object] | None = None) -> None:
        """One step, which may wait for weights where it is alone. A fault ends its requests, and is not raised.

        `before_long` is called before a step that may take longer than the last one. Raises `DeviceFault` when nothing
        more can be computed by this process.
        """

    def rest(self) -> None:
        """Called when nothing is left to do."""

    def kv_stats(self) -> KVStats:
        """Blocks and slots of this instant."""


@dataclass(frozen=True, slots=True)
class _Seat:
    """A model that takes part; ids ascend, and no id comes twice."""

    engine_id: int
    engine: SteppedEngine


class EngineLoop:
    """The thread and its queue. Public methods may be called from any thread."""

    def __init__(
        self,
        publish: Callable[[Outbox], None],
        on_death: Callable[[BaseException], None],
        stream_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publish` and `on_death` are called in the engine thread; they hand over to the asyncio thread.

        `stream_interval_s`: longest time that a token waits for the next one, to leave with it.
        """
        self._publish = publish
        self._on_death = on_death
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._seats: list[_Seat] = []
        self._num_seats = 0
        self._turns = Turns()
        self._reclaimer = KVReclaimer()
        self._outbox: Outbox = []
        self._pace = OutputPace(stream_interval_s, clock)
        self._stopping = False
        self._step_started_s: float | None = None
        self.is_busy = False
        """Whether some model has work; read by others, to stand aside."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after its current step; requests still inside get nothing more. True when it has ended."""
        self._commands.put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stuck_for_s(self) -> float:
        """Seconds the current step has taken so far; 0 between steps."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else self._clock() - started_s

    def add(self, engine: SteppedEngine) -> None:
        """Lets a model take part."""
        self._commands.put(functools.partial(self._add, engine))

    def remove(self, engine: SteppedEngine, on_removed: Callable[[], object]) -> None:
        """Takes a model out; `on_removed` is called in the engine thread once it is touched no more."""
        self._commands.put(functools.partial(self._remove, engine, on_removed))

    def now_s(self) -> float:
        """The clock that arrivals are told in."""
        return self._clock()

    def submit(self, engine: SteppedEngine, request: Request, arrived_s: float) -> None:
        """Hands a request that came in at `arrived_s` to a model."""
        self._commands.put(lambda: engine.submit(request, arrived_s, self._outbox))

    def post(self, action: Callable[[Outbox], object]) -> None:
        """Runs something between two steps that may put deltas out."""
        self._commands.put(lambda: action(self._outbox))

    def cancel(self, engine: SteppedEngine, request_id: RequestId, error: NaruError | None = None) -> None:
        """Ends a request before its next step."""
        self._commands.put(lambda: engine.cancel(request_id, error, self._outbox))

    def call(self, function: Callable[[], object]) -> None:
        """Runs something between two steps, for readers that need a consistent picture."""
        self._commands.put(function)

    def die(self, fault: DeviceFault) -> None:
        """Another thread has found the device failed: the loop ends as if a step had."""

        def raise_() -> None:
            raise fault

        self._commands.put(raise_)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work()
        except BaseException as exc:
            # The top of the thread: whatever got here, nobody is left to serve; say so, for the process to end.
            self._step_started_s = None
            self._on_death(exc)

    def _work(self) -> None:
        ready = [seat for seat in self._seats if seat.engine.has_work]
        self.is_busy = bool(ready)
        if ready:
            self._step(self._choose(ready), is_alone=len(ready) == 1)
        else:
            self._flush()
            self._wait()
        self._take_commands()

    def _choose(self, ready: list[_Seat]) -> _Seat:
        if len(ready) == 1:
            self._turns.choose_only(ready[0].engine_id)
            return ready[0]
        chosen = self._turns.choose([Contender(seat.engine_id, seat.engine.queue_age_s()) for seat in ready])
        return next(seat for seat in ready if seat.engine_id == chosen)

    def _step(self, seat: _Seat, *, is_alone: bool) -> None:
        started_s = self._step_started_s = self._clock()
        seat.engine.step(self._outbox, is_alone=is_alone, before_long=self._flush)
        self._step_started_s = None
        step_s = self._clock() - started_s
        self._turns.charge(seat.engine_id, step_s)
        seat.engine.stats.compute_s += step_s
        if not (is_alone and self._pace.may_wait(self._outbox, step_s)):
            self._flush()

    def _wait(self) -> None:
        """Until a command comes, or the first engine wants to look again."""
        wakes_s = []
        for seat in self._seats:
            wake_s = seat.engine.wake_s
            if wake_s is None:
                seat.engine.rest()
            else:
                wakes_s.append(wake_s)
        timeout_s = max(0.0, min(wakes_s) - self._clock()) if wakes_s else None
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return
        command()
        self._flush()

    def _take_commands(self) -> None:
        if not self._commands.empty():
            while not self._commands.empty():
                self._commands.get()()
            self._flush()

    def _flush(self) -> None:
        if self._outbox:
            full = merged(self._outbox)
            self._outbox.clear()  # the step under way goes on filling it
            self._publish(full)
            self._pace.sent()

    def _add(self, engine: SteppedEngine) -> None:
        self._seats.append(_Seat(self._num_seats, engine))
        self._num_seats += 1
        if engine.kv_space is not None:
            self._reclaimer.add(engine.kv_space)

    def _remove(self, engine: SteppedEngine, on_removed: Callable[[], object]) -> None:
        for seat in self._seats:
            if seat.engine is engine:
                self._turns.forget(seat.engine_id)
                if engine.kv_space is not None:
                    self._reclaimer.remove(engine.kv_space)
        self._seats = [seat for seat in self._seats if seat.engine is not engine]
        on_removed()

    def _stop(self) -> None:
        self._stopping = True
