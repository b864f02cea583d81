"""Runs a program that dies with its parent: ``python -I -S parent_death.py PARENT_PID PROGRAM ARGUMENT...``.

Started by the supervisor in front of every child. Without it, children of a killed ``naru up`` would go on alone. A
small program of its own, not a pre-exec hook: forking a process that has gRPC threads is not safe. Linux only;
elsewhere the program simply runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Asks the kernel for the signal, then becomes the program."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            sys.exit(0)  # it died before the request was in place
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        sys.exit(f"cannot run {command[0]!r}: {exc.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
