"""One child process: started so that it dies with us, its output kept, its end awaited. Called by the supervisor."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from naru_operator.adapters import parent_death

_TAIL_LINES = 40
_MAX_LINE_BYTES = 64 << 10
"""A line without end is cut here: output is untrusted, too."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run."""

    name: str
    """Unique among the children; prefixes its output."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to our own environment."""


OnLine = Callable[[str, str], None]
"""Called with a child's name and one line of its output, without the line's end."""


class ChildProcess:
    """A running child. Made by `start_child`."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.spec = spec
        self._process = process
        self._on_line = on_line
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self._tail)

    async def wait(self) -> int:
        """Waits for its end and for the last line of its output; returns the exit code (negative: the signal)."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open: then the output is not waited for to the end.
        await asyncio.wait({self._reading}, timeout=1.0)
        self._reading.cancel()
        return code

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL after ``grace_s``; returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        pending = b""
        while chunk := await self._process.stdout.read(_MAX_LINE_BYTES):
            *lines, pending = (pending + chunk).split(b"\n")
            if len(pending) > _MAX_LINE_BYTES:
                lines, pending = [*lines, pending], b""
            for line in lines:
                self._emit(line)
        if pending:
            self._emit(pending)

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._tail.append(text)
        self._on_line(self.spec.name, text)


async def start_child(spec: ProcessSpec, on_line: OnLine) -> ChildProcess:
    """Starts a child in a session of its own, so that Ctrl-C in the terminal reaches us alone.

    Raises:
        OSError: no process could be made.
    """
    trampoline = (sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid()))
    process = await asyncio.create_subprocess_exec(
        *trampoline,
        *spec.argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **spec.env},
        start_new_session=True,
    )
    return ChildProcess(spec, process, on_line)
