"""Keeps child processes running: starts them, starts them again with growing pauses, stops them in order.

Called by the controller and by `naru up`. Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from naru_operator.adapters.child_process import ChildProcess, OnLine, ProcessSpec, start_child
from naru_operator.core.backoff import count_failures, restart_delay_s


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """A child ended though nobody asked it to."""

    name: str
    exit_code: int
    """Negative: the signal that ended it."""
    num_failures: int
    """In a row, this one included."""
    restart_in_s: float
    tail: tuple[str, ...]
    """The last lines it wrote."""

    def __str__(self) -> str:
        """What happened, in words."""
        if self.exit_code < 0:
            try:
                return f"{self.name} was ended by {signal.Signals(-self.exit_code).name}"
            except ValueError:
                return f"{self.name} was ended by signal {-self.exit_code}"
        return f"{self.name} ended with exit code {self.exit_code}"


@dataclass(slots=True)
class _Supervised:
    spec: ProcessSpec
    keeper: asyncio.Task[None] | None = None
    child: ChildProcess | None = None
    is_stopping: bool = False


class Supervisor:
    """All children of this process. asyncio thread only."""

    def __init__(self, on_line: OnLine, on_exit: Callable[[ProcessExit], None]) -> None:
        self._on_line = on_line
        self._on_exit = on_exit
        self._supervised: dict[str, _Supervised] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Children that should run, in order of their start; one of them may be waiting for its restart."""
        return tuple(name for name, it in self._supervised.items() if not it.is_stopping)

    def pid(self, name: str) -> int | None:
        """The process id of a child that runs now."""
        it = self._supervised.get(name)
        return it.child.pid if it and it.child else None

    async def start(self, spec: ProcessSpec) -> None:
        """Starts a child and keeps it running from now on.

        Raises:
            OSError: no process could be made.
        """
        assert spec.name not in self._supervised, spec.name
        it = _Supervised(spec)
        self._supervised[spec.name] = it
        try:
            it.child = await start_child(spec, self._on_line)
        except OSError:
            del self._supervised[spec.name]
            raise
        it.keeper = asyncio.create_task(self._keep(it), name=f"keep {spec.name}")

    async def stop(self, name: str, grace_s: float) -> None:
        """Ends a child for good: SIGTERM, SIGKILL after ``grace_s``. Unknown names are ignored."""
        it = self._supervised.get(name)
        if it is None or it.keeper is None:
            return
        it.is_stopping = True
        if it.child is not None:
            await it.child.stop(grace_s)
        it.keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await it.keeper
        self._supervised.pop(name, None)

    def kill_all(self) -> None:
        """SIGKILL to every child, now: a second Ctrl-C."""
        for it in self._supervised.values():
            it.is_stopping = True
            if it.child is not None:
                it.child.signal(signal.SIGKILL)

    async def _keep(self, it: _Supervised) -> None:
        num_failures = 0
        while it.child is not None:
            started_s = time.monotonic()
            exit_code = await it.child.wait()
            tail, it.child = it.child.tail, None
            if it.is_stopping:
                return
            num_failures = count_failures(num_failures, time.monotonic() - started_s)
            delay_s = restart_delay_s(num_failures)
            self._on_exit(ProcessExit(it.spec.name, exit_code, num_failures, delay_s, tail))
            await asyncio.sleep(delay_s)
            it.child = await self._start_again(it.spec)

    async def _start_again(self, spec: ProcessSpec) -> ChildProcess:
        delay_s = 1.0
        while True:
            try:
                return await start_child(spec, self._on_line)
            except OSError as exc:
                # No process could be made (memory, limits): that passes, or the user stops us.
                self._on_line(spec.name, f"could not be started again: {exc.strerror}; trying once more")
                await asyncio.sleep(delay_s)
                delay_s = min(30.0, delay_s * 2)
