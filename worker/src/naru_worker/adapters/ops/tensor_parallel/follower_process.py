"""Rank 0's handle of another rank's process: its connections, what it has been told, and how it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from signal import strsignal

from naru_worker.adapters.ops.tensor_parallel.heartbeat import ask
from naru_worker.adapters.ops.tensor_parallel.joining import Transport
from naru_worker.adapters.ops.tensor_parallel.wire import Frame, send

MODULE = "naru_worker.adapters.ops.tensor_parallel.follower"


class FollowerProcess:
    """Not thread-safe but for `send` beside all else."""

    def __init__(self, rank: int, size: int, transport: Transport, timeout_s: float, start_timeout_s: float) -> None:
        """Starts it. It must take orders within `timeout_s`, and say within `start_timeout_s` that it has started.

        Raises:
            OSError: it cannot be started.
        """
        self.rank = rank
        self.waiting: dict[int, float] = {0: time.monotonic() + start_timeout_s}
        """Order to the time by which it must be answered."""
        self.errors: dict[int, str] = {}
        """Answers that were errors, until they are looked at."""
        self.is_out = False
        """It has stopped because another one did."""
        pairs = [socket.socketpair(), socket.socketpair()]
        (self.connection, orders), (self._pulse, pulse) = pairs
        command = [sys.executable, "-P", "-m", MODULE, str(orders.fileno()), str(pulse.fileno())]
        command += [str(rank), str(size), str(os.getpid()), transport]
        try:
            # Signals of the terminal and of the container go to rank 0, which ends the others.
            self._process = subprocess.Popen(
                command,
                pass_fds=[orders.fileno(), pulse.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpu_of(rank)} if transport == "nccl" else {}),
            )
        except BaseException:
            self.connection.close()
            self._pulse.close()
            raise
        finally:
            orders.close()
            pulse.close()
        self.connection.settimeout(timeout_s)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Tells it something.

        Raises:
            OSError: it is gone, or takes nothing any more.
        """
        send(self.connection, frame)

    def has_answered(self, number: int) -> bool:
        """Whether an order is done, or was not to be answered."""
        return number not in self.waiting

    def is_late(self, now_s: float) -> bool:
        """Whether it owes an answer."""
        return now_s > min(self.waiting.values(), default=now_s)

    def progress(self, patience_s: float) -> int | None:
        """How many exchanges it has begun; None: it does not even say that."""
        return ask(self._pulse, patience_s)

    def exit_reason(self, patience_s: float) -> tuple[int | None, str]:
        """(exit status, in words) of a process that has hung up; None: it still runs."""
        try:
            status = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None, "it has hung up"
        if status < 0:
            return status, f"its process was ended by signal {-status} ({strsignal(-status)})"
        return status, f"its process has ended with status {status}"

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    def end(self, patience_s: float) -> None:
        """Waits for its end, with so much patience, and lets go of everything."""
        try:
            self._process.wait(max(0.0, patience_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.connection.close()
        self._pulse.close()


def gpu_of(rank: int) -> str:
    """The name of a rank's GPU, which is the only one that its process may see: no thread of it can take another.

    Raises:
        ValueError: this process may not see so many.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(rank)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if rank >= len(names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {visible!r}: there is no GPU for rank {rank}; give the pod as many as ranks"
        )
    return names[rank]
