"""What can go wrong with a cluster: the machine cannot carry one, a part fails, a command fails."""

from __future__ import annotations


class ClusterError(Exception):
    """A cluster, or a part of it, does not do what it should; the message says what was seen."""


class Unavailable(ClusterError):
    """This machine lacks something a cluster needs; the message says what, and what to do about it."""


class CommandFailed(ClusterError):
    """A command ended with a status other than 0; the message is what it wrote."""

    def __init__(self, command: str, rc: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{command!r} ended with status {rc}: {stderr.strip() or stdout.strip()}")
        self.rc = rc
        self.stdout = stdout
        self.stderr = stderr
