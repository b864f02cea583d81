"""The command `naru-router`: reads settings, runs the router until SIGTERM or SIGINT, drains, exits 0."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys

import uvloop

from naru_proto.settings import SettingsError
from naru_router.adapters.processes import EXIT_BAD_SETTINGS, Processes
from naru_router.app import App, build
from naru_router.settings import Settings, load_settings

PR_SET_PDEATHSIG = 1
COLLECT_AFTER = 20_000
"""Objects that may be in cycles, made since the last look: those of some dozen requests."""


def main() -> None:
    """Runs the router; the process ends with its exit status."""
    parent_pid = os.getppid()
    try:
        settings = load_settings(sys.argv[1:], os.environ)
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
        )
        if settings.exit_with_parent:
            _exit_with_parent(parent_pid)
        if settings.num_processes > 1:
            sys.exit(asyncio.run(Processes(settings, sys.argv[1:]).run()))
        sys.exit(uvloop.run(_run(settings)))
    except SettingsError as exc:
        print(f"naru-router: {exc}", file=sys.stderr)
        sys.exit(EXIT_BAD_SETTINGS)


async def _run(settings: Settings) -> int:
    app = build(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    try:
        await app.start()
        host, scheme = settings.host, "https" if settings.tls_cert_file else "http"
        print(f"naru-router ready: {scheme}://{host}:{app.http_port} grpc {host}:{app.grpc_port}", flush=True)
        _spare_collector()
        await _until(app, stop)
        await app.drain()
    finally:
        await app.stop()
    return 0


def _spare_collector() -> None:
    """Has the garbage collector leave alone what stays, and look less often: nearly all garbage is in no cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


async def _until(app: App, stop: asyncio.Event) -> None:
    """Returns when a signal came; raises when a part of the app fails."""
    parts = asyncio.create_task(app.wait())
    signals = asyncio.create_task(stop.wait())
    await asyncio.wait((parts, signals), return_when=asyncio.FIRST_COMPLETED)
    signals.cancel()
    if parts.done():
        parts.result()
    parts.cancel()


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(1)  # asked twice: do not wait for the drain
    stop.set()


def _exit_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise SettingsError(f"exit_with_parent is True, and prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent ended before the kernel knew whom to watch


if __name__ == "__main__":
    main()
