"""The processes of a cluster by name: start and wait until ready, kill, start again, show the end of their logs.

Called by `naru_cluster.cluster`. A process is known by a file, so that a later command can kill what another started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from naru_cluster.errors import ClusterError
from naru_cluster.namespaces import Namespaces, read_pid, write_pid

READY_TIMEOUT_S = 90.0
_LEFT: list[subprocess.Popen[bytes]] = []
"""Children that outlive this process: an object that nobody holds would warn of them."""


@dataclass(frozen=True, slots=True)
class Component:
    """One process: what is started and what makes it ready."""

    name: str
    namespaces: Namespaces
    arguments: tuple[str, ...]
    is_ready: Callable[[], bool]
    environment: Mapping[str, str] = field(default_factory=dict)


class InsideProcess:
    """A process inside, to be signalled and waited for from outside."""

    def __init__(self, pid: int, entrance: subprocess.Popen[bytes]) -> None:
        self.pid = pid
        """As seen from outside."""
        self._entrance = entrance

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the process; does nothing when it has ended."""
        if self._entrance.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Its status, as `subprocess.Popen.poll` gives it."""
        return self._entrance.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        return self._entrance.wait(timeout_s)


class Components:
    """The processes of one cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Component] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        """The `nsenter` processes before the components; they end with them."""

    def add(self, component: Component) -> None:
        """Makes a component known without starting it."""
        self._known[component.name] = component

    def forget(self, prefix: str) -> None:
        """Forgets the components whose names begin so; they must have ended."""
        self._known = {name: component for name, component in self._known.items() if not name.startswith(prefix)}

    def names(self) -> list[str]:
        """All known components, in the order they start in."""
        return list(self._known)

    def pid(self, name: str) -> int | None:
        """Id of the component's process while it lives, as seen from outside."""
        return read_pid(self._pid_file(name))

    def start(self, *names: str) -> None:
        """Starts components that do not run yet, all at once, and waits until each is ready.

        Raises:
            ClusterError: one ended or was not ready in time; with the end of its log.
        """
        for name in names:
            if self.pid(name) is None:
                self._spawn(self._find(name))
        deadline = time.monotonic() + READY_TIMEOUT_S
        for name in names:
            while not self._find(name).is_ready():
                if self.pid(name) is None:
                    raise ClusterError(f"{name} ended:\n{self.tail(name)}")
                if time.monotonic() > deadline:
                    raise ClusterError(f"{name} was not ready within {READY_TIMEOUT_S:.0f} s:\n{self.tail(name)}")
                time.sleep(0.05)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal and returns when the process is gone.

        Raises:
            ClusterError: it does not run, or does not end.
        """
        self._find(name)
        pid = self.pid(name)
        if pid is None:
            raise ClusterError(f"{name} does not run")
        os.kill(pid, number)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while self.pid(name) is not None:
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} does not end on {number.name}")
            time.sleep(0.02)

    def tail(self, name: str, num_bytes: int = 4096) -> str:
        """The end of a log."""
        try:
            with open(self.log_file(name), "rb") as handle:
                handle.seek(max(0, os.fstat(handle.fileno()).st_size - num_bytes))
                return handle.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def log_file(self, name: str) -> Path:
        """Where a component, or anything else that runs inside, writes."""
        return self._folder / "log" / f"{name.replace('/', '-')}.log"

    def log_files(self) -> Iterator[tuple[str, Path]]:
        """All logs, by name."""
        for path in sorted((self._folder / "log").glob("*.log")):
            yield path.stem, path

    def launch(
        self, namespaces: Namespaces, arguments: Sequence[str], environment: Mapping[str, str], log: str
    ) -> InsideProcess:
        """Starts any process inside; it ends with the cluster. Its output is appended to its log.

        Raises:
            ClusterError: it could not be started.
        """
        path = self.log_file(log)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as output:
            child = subprocess.Popen(
                namespaces.command(arguments),
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._children.append(child)
        process = psutil.Process(child.pid)
        while not (inside := process.children()):
            if child.poll() is not None:
                raise ClusterError(f"{log} did not start:\n{self.tail(log)}")
            time.sleep(0.005)
        return InsideProcess(inside[0].pid, child)

    def leave(self) -> None:
        """Gives up the children of this process: what they started goes on after it."""
        _LEFT.extend(self._children)
        self._children.clear()

    def reap(self) -> None:
        """Waits for the children this process has, once everything inside has ended."""
        for child in self._children:
            child.wait()
        self._children.clear()

    def _spawn(self, component: Component) -> None:
        process = self.launch(component.namespaces, component.arguments, component.environment, component.name)
        write_pid(self._pid_file(component.name), process.pid)

    def _find(self, name: str) -> Component:
        if name not in self._known:
            raise ClusterError(f"{name!r} is not a component of this cluster: there are {', '.join(self._known)}")
        return self._known[name]

    def _pid_file(self, name: str) -> Path:
        return self._folder / "run" / f"{name.replace('/', '-')}.pid"
