"""Speaks with one packing process. Blocking: for a loading thread.

Used by `PackingPool`. The process ends with this one: it is killed when told to stop, when it breaks the protocol, and
by the kernel when the worker dies. See `pack` for what it says and is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from naru_proto.errors import BY_CODE, LoadError
from naru_worker.adapters.images.errors import LoadStopped

MODULE = "naru_worker.adapters.images.pack"
STOP_POLL_S = 0.02
"""How often a pipe that says nothing is left to look at the stop event: an event cannot be waited for with a pipe."""
MAX_LINE_BYTES = 256 * 1024
_MAX_SHOWN_CHARS = 500


class PackingDied(LoadError):
    """The process died, or said nonsense."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What the process would write."""

    digest: str
    num_bytes: int


class PackingProcess:
    """A running process, used by one thread at a time: `plan` a model, then `write` or `skip` it, then the next one.

    Whoever has it closes it, unless it `is_fit` for another model. An error in the middle leaves it unfit.
    """

    def __init__(self) -> None:
        """Starts it; it dies with the thread that does.

        Raises:
            OSError: it cannot be started.
        """
        self._source = Path()
        self._should_stop = threading.Event()
        self._state: Literal["idle", "planning", "planned", "ending", "closed"] = "idle"
        self._buffer = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile(buffering=0)
        command = [sys.executable, "-P", "-m", MODULE, str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except BaseException:
            self._errors.close()
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def is_fit(self) -> bool:
        """Whether it waits for another model: its last one has ended well, and it has not said or done more."""
        if self._state != "idle" or self._buffer:
            return False
        # It would end, or speak out of turn.
        return not self._has_news(0.0)

    def close(self) -> None:
        """Kills it; again is nothing."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._process.kill()
        self._process.wait()
        for pipe in (self._orders, self._answers, self._errors):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def plan(self, source: Path, destination: Path, should_stop: threading.Event) -> PackPlan:
        """Hands it a model and waits until that is read; the event counts to the model's end.

        Raises:
            PackingDied: it died, or said nonsense.
            LoadError: the source cannot be served.
            LoadStopped: it was told to stop.
        """
        assert self._state == "idle", "one model at a time"
        self._state = "planning"
        self._source, self._should_stop = source, should_stop
        # Parent and child share the file's position.
        self._errors.seek(0)
        self._errors.truncate()
        self._tell(source=_text(source), destination=_text(destination))
        line = self._next()
        digest, num_bytes = line.get("digest"), line.get("num_bytes")
        if not isinstance(digest, str) or not digest.isalnum() or type(num_bytes) is not int or num_bytes < 1:
            raise LoadError(f"{self._source}: the packing process said {line!r} instead of its plan")
        self._state = "planned"
        return PackPlan(digest, num_bytes)

    def write(self, on_progress: Callable[[int, int], None]) -> None:
        """Has the destination written; returns when it is whole and on the disk.

        Raises:
            LoadError: it cannot be written, or the process died.
            LoadStopped: it was told to stop.
        """
        self._end(True, on_progress)

    def skip(self) -> None:
        """Lets go of a planned model; one that has ended already stays so.

        Raises:
            LoadError: the process died.
            LoadStopped: it was told to stop.
        """
        if self._state == "planned":
            self._end(False, lambda done, total: None)

    def _end(self, is_wanted: bool, on_progress: Callable[[int, int], None]) -> None:
        assert self._state == "planned", "first the plan"
        self._state = "ending"
        self._tell(write=is_wanted)
        while True:
            line = self._next()
            if line.get("finished") is True:
                self._ended(line)
                return
            done, total = line.get("done"), line.get("total")
            if type(done) is int and type(total) is int:
                on_progress(done, total)

    def _ended(self, line: Mapping[str, object]) -> None:
        if line.get("goes_on") is True:
            self._state = "idle"

    def _tell(self, **values: object) -> None:
        left = memoryview(json.dumps(values).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._orders.fileno(), left) :]
        except BrokenPipeError:
            raise self._death() from None

    def _next(self) -> Mapping[str, object]:
        """The next line that is no error."""
        raw = self._read_line()
        try:
            line = json.loads(raw) if raw else None
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise self._death()
        if "message" in line:
            self._ended(line)
            kind = BY_CODE.get(str(line.get("code")), LoadError)
            raise kind(str(line["message"]), param=str(line.get("param", "")))
        return line

    def _read_line(self) -> bytes:
        """Empty: the pipe has ended, or the line does not."""
        while True:
            if self._should_stop.is_set():
                raise LoadStopped(f"{self._source}: the load was told to stop while it was packed")
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                return line
            if len(line) > MAX_LINE_BYTES:
                return b""
            if self._has_news(STOP_POLL_S):
                piece = os.read(self._answers.fileno(), MAX_LINE_BYTES)
                if not piece:
                    return b""
                self._buffer += piece

    def _has_news(self, limit_s: float) -> bool:
        """Whether it says something, or ends, within the limit. (`select` refuses descriptors above 1023.)"""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def _death(self) -> PackingDied:
        """What is known of a process that has said nothing, or nonsense."""
        self._process.kill()
        status = self._process.wait()
        if status < 0:
            how = f"was ended by signal {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]
        why = f" and said {said!r}" if said else "; the file may be broken, or memory short"
        return PackingDied(f"{self._source}: the packing process {how}{why}")


def _text(path: Path) -> str:
    """The path's bytes as text, whatever the encoding of file names is here and there."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")
