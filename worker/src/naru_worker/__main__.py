"""`naru-worker`: reads settings, runs the worker until a signal, and says how it ended."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from naru_worker.settings import SettingsError, WorkerSettings
from naru_worker.settings_source import read_settings

COLLECT_AFTER = 20_000
"""Objects that may be in cycles, made since the last look: those of some hundred steps."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Exits with 0 after a drain, 1 when broken or unable to start, 2 for bad settings."""
    parent_pid = os.getppid()
    try:
        settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as exc:
        print(f"naru-worker: {exc}", file=sys.stderr)
        raise SystemExit(2) from None
    logging.basicConfig(
        level=settings.server.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    if settings.server.exit_with_parent:
        from naru_worker.adapters import machine

        machine.die_with_parent(parent_pid)
    # Half of the start is importing: what models need comes in beside what the server needs.
    threading.Thread(target=importlib.import_module, args=("naru_worker.adapters.engine.loading",), daemon=True).start()
    code = asyncio.run(_serve(settings))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a hung step or download would keep its thread, and with it the process, for ever.
    os._exit(code)


async def _serve(settings: WorkerSettings) -> int:
    from naru_worker import app

    try:
        worker = app.build(settings)
    except app.StartError as exc:
        print(f"naru-worker: {exc}", file=sys.stderr)
        return 1
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        # SIGTERM is how a cluster asks, which may bring the models up elsewhere; SIGINT is a person.
        if not worker.end(may_move=number is signal.SIGTERM):
            os._exit(1)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await worker.start()
    except app.StartError as exc:
        print(f"naru-worker: {exc}", file=sys.stderr)
        return 1
    _spare_collector()
    metrics = f", metrics http://{worker.metrics_address}/metrics" if worker.metrics_address else ""
    print(f"naru-worker {worker.worker_id} ready: grpc {worker.address}{metrics}", flush=True)
    await worker.stopping.wait()
    return await worker.shut_down()


def _spare_collector() -> None:
    """Has the garbage collector leave alone what stays, and look less often: nearly all garbage is in no cycle."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


if __name__ == "__main__":
    main()
