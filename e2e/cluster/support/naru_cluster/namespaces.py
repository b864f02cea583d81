"""A machine inside the machine: network, mount and process namespaces under one supervisor whose death ends everything.

The supervisor is `unshare --kill-child`; its child, `pause`, is process 1 inside. When the supervisor dies, the kernel
kills that child, with it every process of the namespace, and with the last of them go mounts and network. So nothing
is left behind, however the owner ends. Called by `naru_cluster.node`; knows nothing of Kubernetes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from naru_cluster.errors import ClusterError
from naru_cluster.machine import enter_network

P = ParamSpec("P")
R = TypeVar("R")

_START_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 30.0

_INIT = """
set -e
mount --make-rshared /
mount -t tmpfs -o mode=755 naru /run
while read -r source target; do
  [ -d "$source" ] && mkdir -p "$target"
  mount --bind "$source" "$target"
done < "$1/run/binds"
ip link set lo up
touch "$1/run/inside"
exec "$2"
"""


class Namespaces:
    """The namespaces of one node; `folder` keeps the supervisor's id for other processes that use them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._threads: ThreadPoolExecutor | None = None

    def start(self, pause: str, binds: Mapping[Path, str], *, end_with_caller: bool) -> None:
        """Makes them, with `binds` (source here → path inside) mounted.

        Raises:
            ClusterError: they could not be made; says what was written.
        """
        run = self.folder / "run"
        run.mkdir(parents=True, exist_ok=True)
        (run / "binds").write_text("".join(f"{source} {target}\n" for source, target in binds.items()))
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["--propagation", "private", "sh", "-c", _INIT, "init", str(self.folder), pause]
        if end_with_caller:
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with open(run / "init.log", "wb") as log:
            self._supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        write_pid(run / "supervisor.pid", self._supervisor.pid)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (run / "inside").exists():
            if self._supervisor.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(f"no namespaces: {(run / 'init.log').read_text().strip()!r}")
            time.sleep(0.01)
        (child,) = psutil.Process(self._supervisor.pid).children()
        write_pid(run / "init.pid", child.pid)

    @property
    def is_up(self) -> bool:
        """Whether the supervisor lives."""
        return read_pid(self.folder / "run" / "supervisor.pid") is not None

    @property
    def init_pid(self) -> int:
        """Process 1 of the namespaces, as seen from outside.

        Raises:
            ClusterError: they are not there.
        """
        pid = read_pid(self.folder / "run" / "init.pid")
        if pid is None:
            raise ClusterError(f"the namespaces of {self.folder} are gone")
        return pid

    def command(self, arguments: Sequence[str], *, network_only: bool = False) -> list[str]:
        """The command line that runs `arguments` inside."""
        kinds = ["--net"] if network_only else ["--net", "--mount", "--pid"]
        return ["nsenter", "--target", str(self.init_pid), *kinds, "--", *arguments]

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function of this process in a thread whose sockets are inside."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, initializer=enter_network, initargs=(self.init_pid,))
        return self._threads.submit(function, *args, **kwargs).result()

    def close(self) -> None:
        """Ends the thread of `call`, which would keep the network alive."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def end(self) -> None:
        """Ends everything inside and returns when it is gone; does nothing when it is gone already.

        Raises:
            ClusterError: processes do not go away.
        """
        run = self.folder / "run"
        self.close()
        init = read_pid(run / "init.pid")
        if pid := read_pid(run / "supervisor.pid"):
            os.kill(pid, signal.SIGKILL)
        if self._supervisor is not None:
            self._supervisor.wait()
        # The kernel lets process 1 go only after every other process of its namespace.
        deadline = time.monotonic() + _END_TIMEOUT_S
        while init is not None and _lives(init):
            if time.monotonic() > deadline:
                raise ClusterError(f"process {init} of {self.folder} does not end")
            time.sleep(0.02)


def write_pid(path: Path, pid: int) -> None:
    """Keeps a process id with its start time, so that it is never mistaken for a later process."""
    path.write_text(f"{pid} {psutil.Process(pid).create_time()}")


def read_pid(path: Path) -> int | None:
    """The process id kept by `write_pid` while that process lives."""
    try:
        pid, created = path.read_text().split()
        process = psutil.Process(int(pid))
        alive = process.create_time() == float(created) and not _has_ended(process)
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process.pid if alive else None


def _has_ended(process: psutil.Process) -> bool:
    """Whether nothing of it is left: while other threads of a zombie still end, its sockets are open."""
    return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1


def _lives(pid: int) -> bool:
    try:
        return not _has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
