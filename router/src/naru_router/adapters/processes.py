"""Several router processes on one port: starts them, starts again what dies, passes signals on, ends with them.

Each process is a router of its own, with its own links and counts; the kernel deals connections out among those that
listen on the port. This one serves nothing: it keeps the ports bound, so that they stay when all others are down. Run
by `__main__` for `--num-processes` above 1.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from naru_proto.settings import SettingsError
from naru_router.adapters.listeners import bind
from naru_router.settings import Settings

logger = logging.getLogger(__name__)

READY = "naru-router ready:"
EXIT_BAD_SETTINGS = 2
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0
SETTLED_S = 10.0
"""A process that has run for so long was started well."""


class Processes:
    """The processes of one router command."""

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        """`arguments`: of the command, handed on to each process."""
        self._settings = settings
        self._arguments = arguments
        self._stop = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._num_ready = 0
        self._is_told = False
        self._failure: SettingsError | None = None
        self._ports: tuple[int, int] = (0, 0)

    async def run(self) -> int:
        """Runs them until a signal has come and all have ended; the exit status.

        Raises:
            SettingsError: a port cannot be had, or a process says that its settings are wrong.
        """
        settings = self._settings
        with ExitStack() as held:
            http = held.enter_context(_hold(settings.host, settings.http_port, "--http-port"))
            grpc = held.enter_context(_hold(settings.host, settings.grpc_port, "--grpc-port"))
            self._ports = http.getsockname()[1], grpc.getsockname()[1]
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
            statuses = await asyncio.gather(*(self._keep(index) for index in range(settings.num_processes)))
        if self._failure is not None:
            raise self._failure
        return max(statuses)

    async def _keep(self, index: int) -> int:
        """Keeps one process running; its last exit status."""
        backoff_s = BACKOFF_MIN_S
        while True:
            started_s = time.monotonic()
            status = await self._run_once(index)
            if self._stop.is_set():
                return status
            if status == EXIT_BAD_SETTINGS and not self._is_told:
                self._failure = self._failure or SettingsError("a process could not start; its message stands above")
                self._end(signal.SIGTERM)
                return status
            if time.monotonic() - started_s > SETTLED_S:
                backoff_s = BACKOFF_MIN_S
            logger.error("router process %d ended with status %d; it is started again", index, status)
            await self._pause(backoff_s)
            if self._stop.is_set():
                return 0
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _run_once(self, index: int) -> int:
        http_port, grpc_port = self._ports
        flags = ["--num-processes=1", "--share-ports", "--exit-with-parent"]
        flags += [f"--http-port={http_port}", f"--grpc-port={grpc_port}"]
        if self._settings.process_port:
            flags.append(f"--process-port={self._settings.process_port + index}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "naru_router", *self._arguments, *flags, stdout=asyncio.subprocess.PIPE
        )
        self._running[index] = process
        if self._stop.is_set():
            process.terminate()  # the signal came while it was being made
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.decode().startswith(READY):
                    self._count_ready()
            return await process.wait()
        finally:
            del self._running[index]

    def _count_ready(self) -> None:
        self._num_ready += 1
        if self._num_ready >= self._settings.num_processes and not self._is_told:
            self._is_told = True
            host, (http_port, grpc_port) = self._settings.host, self._ports
            print(f"{READY} http://{host}:{http_port} grpc {host}:{grpc_port}", flush=True)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._end(signal.SIGKILL)  # asked twice: do not wait for the drain
            os._exit(1)
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        self._stop.set()
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(number)


def _hold(host: str, port: int, flag: str) -> socket.socket:
    """A socket that has the port and does not listen: connections go to the processes that do."""
    if port:
        bind(host, port, flag).close()  # what is shared would not notice that another router has the port
    return bind(host, port, flag, is_shared=True)
