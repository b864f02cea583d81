"""The engine thread: owns every loaded model's engine, and is the only one to touch them.

Other threads post commands; the asyncio thread gets each step's output in one call. Idle means blocked on the queue,
not spinning. Models with work take turns, one step each.

    commands ──► queue ──► [engine thread: commands, step, publish, commands, step, …] ──► asyncio thread
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import Outbox
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.request import Request, RequestId


class SteppedEngine(Protocol):
    """One model, as the loop sees it. Every method is called in the engine thread; `stats` may be read from any."""

    stats: EngineStats

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        """Takes a request that came in at `arrived_s`; what is wrong with it becomes its last delta."""

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        """Ends a request, as cancelled or with `error`; an unknown or finished one is ignored."""

    def step(self, outbox: Outbox) -> None:
        """One step. A fault in it ends the requests of that step, and is not raised."""

    def rest(self) -> None:
        """Called when nothing is left to do."""

    def kv_stats(self) -> KVStats:
        """Blocks and slots of this instant."""


class EngineLoop:
    """The thread and its queue. Public methods may be called from any thread."""

    def __init__(
        self,
        publish: Callable[[Outbox], None],
        on_death: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publish` and `on_death` are called in the engine thread; they hand over to the asyncio thread."""
        self._publish = publish
        self._on_death = on_death
        self._clock = clock
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._engines: list[SteppedEngine] = []
        self._outbox: Outbox = []
        self._stopping = False
        self._step_started_s: float | None = None
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
        self._commands.put(functools.partial(self._engines.append, engine))

    def remove(self, engine: SteppedEngine, on_removed: Callable[[], object]) -> None:
        """Takes a model out; `on_removed` is called in the engine thread once it is touched no more."""
        self._commands.put(functools.partial(self._remove, engine, on_removed))

    def now_s(self) -> float:
        """The clock that arrivals are told in."""
        return self._clock()

    def submit(self, engine: SteppedEngine, request: Request, arrived_s: float) -> None:
        """Hands a request that came in at `arrived_s` to a model."""
        self._commands.put(lambda: engine.submit(request, arrived_s, self._outbox))

    def cancel(self, engine: SteppedEngine, request_id: RequestId, error: NaruError | None = None) -> None:
        """Ends a request before its next step."""
        self._commands.put(lambda: engine.cancel(request_id, error, self._outbox))

    def call(self, function: Callable[[], object]) -> None:
        """Runs something between two steps, for readers that need a consistent picture."""
        self._commands.put(function)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work()
        except BaseException as exc:
            # The top of the thread: whatever got here, nobody is left to serve; say so, for the process to end.
            self._step_started_s = None
            self._on_death(exc)

    def _work(self) -> None:
        if not any(engine.has_work for engine in self._engines):
            for engine in self._engines:
                engine.rest()
            self._commands.get()()
        self._take_commands()
        for engine in tuple(self._engines):
            if self._stopping:
                return
            if engine.has_work:
                self._step_started_s = self._clock()
                engine.step(self._outbox)
                self._step_started_s = None
                self._flush()
                self._take_commands()

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()
        self._flush()

    def _flush(self) -> None:
        if self._outbox:
            full, self._outbox = self._outbox, []
            self._publish(full)

    def _remove(self, engine: SteppedEngine, on_removed: Callable[[], object]) -> None:
        if engine in self._engines:
            self._engines.remove(engine)
        on_removed()

    def _stop(self) -> None:
        self._stopping = True
