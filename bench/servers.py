"""Starts and stops the servers that are compared: one process tree at a time, told apart by process id.

`ServerSpec` is data (what to run, how to know that it is ready); `Server` carries it out. What the command lines are
stands in `engines`. Nothing here measures.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
from bench.machine import Usage, process_tree, usage_of

POLL_S = 0.1
STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """A server did not start, or ended by itself."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server to run on 127.0.0.1."""

    name: str
    argv: tuple[str, ...]
    port: int
    ready_path: str
    """Answers 200 when requests can be served."""
    model: str
    """Model name that requests carry."""
    start_timeout_s: float
    stop_timeout_s: float = STOP_TIMEOUT_S
    """What it gets to leave by itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    settings: str = ""
    """For the report: how it was set up, in words."""
    version: str = ""
    cases: tuple[str, ...] = ()
    """Those it is for; empty: all."""
    library: str = ""
    """Part of the name of a library that one of its processes must have loaded: the kernels it was restricted to."""
    slots_folder: Path | None = None
    """Where a llama-server with one slot keeps what a prompt left in it."""


class Server:
    """A running server; leaving the `with` block ends its whole process tree."""

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.start_s = 0.0
        """Seconds from start of the process to ready."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        """Starts and waits until ready.

        Raises:
            ServerError: it ended, or was not ready in time; the message holds the end of its log.
        """
        started_s = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.spec.environment},
                start_new_session=True,
            )
        try:
            self._wait_until_ready(started_s + self.spec.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process is not None
        return self._process.pid

    def usage(self) -> Usage:
        """Of the whole tree, so far."""
        return usage_of(self.pid)

    def check_alive(self) -> None:
        """Raises ServerError when the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerError(f"{self.spec.name} ended {exit_words(code)}; {self._log_tail()}")

    def check_library(self) -> None:
        """Raises ServerError when no process of the tree has loaded the library that the spec names."""
        if self.spec.library and not has_loaded(self.spec.library, [process.pid for process in process_tree(self.pid)]):
            raise ServerError(f"{self.spec.name} has not loaded {self.spec.library}: it uses other kernels")

    def stop(self) -> None:
        """SIGTERM to the process, time to leave, then SIGKILL to whatever of its tree is left."""
        if self._process is None:
            return
        end_tree(self._process, self.spec.stop_timeout_s)
        self._process = None

    def _wait_until_ready(self, deadline_s: float) -> None:
        while not answers(self.spec.port, self.spec.ready_path):
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"{self.spec.name} was not ready within {self.spec.start_timeout_s:g} s; {self._log_tail()}"
                )
            time.sleep(POLL_S)

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return "\n    ".join([f"the end of its log {self.log_path}:", *lines])


def end_tree(process: subprocess.Popen[bytes], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """SIGTERM to `process`, time to leave, then SIGKILL to what is left of its descendants and of its process group.

    The process must lead a group of its own: that is how orphans of a crashed leader are found.
    """
    tree = process_tree(process.pid)
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=timeout_s)
    for survivor in alive:
        try:
            survivor.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=5)
    process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def has_loaded(library: str, pids: Sequence[int]) -> bool:
    """Whether one of the processes maps a file whose path contains `library`."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if library in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


def answers(port: int, path: str) -> bool:
    """Whether GET `path` on 127.0.0.1 gives 200 now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def exit_words(code: int) -> str:
    """A return code of `subprocess` in words: a negative one is the number of the signal that killed the process."""
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
