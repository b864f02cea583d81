"""`naru up`: from manifests to a running instance and back. Checks everything that can be checked before it starts.

The instance itself is `local_instance`; this is its life: start, ready line, edits of manifests, signals, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from naru_operator.adapters.log_file import LogFile
from naru_operator.adapters.manifest_files import manifest_changes, read_manifests
from naru_operator.adapters.ports import free_ports, require_port
from naru_operator.adapters.process_age import own_age_s, process_start
from naru_operator.adapters.redis_server import find_redis_server, redis_url
from naru_operator.adapters.router_probe import tasks_of_models
from naru_operator.adapters.run_state import RunState, naru_home, private_folder, running, write_run_state
from naru_operator.cli.local_instance import Endpoints, LocalInstance
from naru_operator.cli.progress import LineProgress, open_progress
from naru_operator.cli.text import listed
from naru_operator.cli.up_events import UpEvents
from naru_operator.core.desired import DesiredState, desired_state
from naru_proto.errors import InvalidRequest

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_EXIT_BASE = 128
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The command line."""

    paths: tuple[Path, ...]
    host: str
    http_port: int
    grpc_port: int
    num_workers: int | None
    redis_url: str | None
    log_dir: Path | None
    is_verbose: bool
    num_routers: int = 1
    tenants_file: Path | None = None


class _Signals:
    """The first signal asks for an orderly stop, the next one for an immediate one."""

    def __init__(self, on_second: Callable[[], None]) -> None:
        self.first: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        self._on_second = on_second
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.first.done():
            self._on_second()
        else:
            self.first.set_result(number)


def run_up(options: UpOptions) -> int:
    """Serves until a signal; returns the exit code.

    Raises:
        InvalidRequest: manifests or flags at fault; nothing was started.
        NaruError: it could not be started; everything was stopped again.
    """
    desired = _desired(options)
    require_port(options.host, options.http_port, "--http-port (or NARU_HTTP_PORT)")
    require_port(options.host, options.grpc_port, "--grpc-port (or NARU_GRPC_PORT)")
    if options.http_port and options.http_port == options.grpc_port:
        raise InvalidRequest(f"--http-port and --grpc-port are both {options.http_port}; choose two")
    if options.tenants_file is not None:
        # Imported here: without tenants nothing of it is needed at the start.
        from naru_operator.adapters.tenants_file import read_tenants_file

        read_tenants_file(options.tenants_file)
    redis_program = None if options.redis_url else find_redis_server()
    running(naru_home())  # for what a killed instance left behind
    with _noted(options, private_folder()) as (endpoints, redis_url):
        with LogFile(options.log_dir or endpoints.folder) as log:
            view = UpEvents(LineProgress(), log, is_verbose=options.is_verbose)
            make = functools.partial(LocalInstance, endpoints, view, redis_program=redis_program, redis_url=redis_url)
            return asyncio.run(_serve(options, desired, endpoints, view, make))


@contextlib.contextmanager
def _noted(options: UpOptions, folder: Path) -> Iterator[tuple[Endpoints, str]]:
    """Where the instance will be, left as a note for other commands while the context lasts.

    Before the first child starts: if we are killed, the next command finds the folder by the note.
    """
    note: Path | None = None
    try:
        wanted = [options.http_port, options.grpc_port, *([0, 0] * (options.num_routers - 1))]
        free = iter(free_ports(options.host, wanted.count(0), taken=wanted))
        http_port, grpc_port, *more = (port or next(free) for port in wanted)
        pairs = tuple(zip(more[::2], more[1::2], strict=True))
        files = naru_home() / "files"
        endpoints = Endpoints(options.host, http_port, grpc_port, folder, pairs, options.tenants_file, files)
        url = options.redis_url or redis_url(folder)
        note = write_run_state(naru_home(), _state(endpoints, url, options))
        yield endpoints, url
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if note is not None:
            note.unlink(missing_ok=True)


def _desired(options: UpOptions) -> DesiredState:
    manifests = read_manifests(options.paths)
    return desired_state(manifests, num_cores=len(os.sched_getaffinity(0)), num_workers=options.num_workers)


async def _serve(
    options: UpOptions,
    desired: DesiredState,
    endpoints: Endpoints,
    events: UpEvents,
    make_instance: Callable[[], LocalInstance],
) -> int:
    instance = make_instance()
    signals = _Signals(instance.kill)
    try:
        with open_progress() as view:
            events.view = view
            starting = asyncio.create_task(_start(instance, desired), name="start")
            waiting: set[asyncio.Future[Any]] = {starting, signals.first}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return _SIGNAL_EXIT_BASE + signals.first.result()
            starting.result()
        events.serving(LineProgress())
        tasks = await tasks_of_models(endpoints.reachable_host, endpoints.http_port)
        _print_ready(endpoints, desired, events, tasks)
        async with _applying_edits(options, instance, events):
            await signals.first
        click.echo("stopping (Ctrl-C again ends at once)", err=True)
        return 0
    finally:
        await instance.stop()


async def _start(instance: LocalInstance, desired: DesiredState) -> None:
    await instance.start(desired)
    await instance.wait_ready(desired)


def _state(endpoints: Endpoints, redis_url: str, options: UpOptions) -> RunState:
    return RunState(
        pid=os.getpid(),
        process_start=process_start(os.getpid()),
        http_url=endpoints.http_url,
        grpc_address=endpoints.grpc_address,
        redis_url=redis_url,
        folder=str(endpoints.folder),
        log_dir=str((options.log_dir or endpoints.folder).absolute()),
        more_http_urls=endpoints.more_http_urls,
    )


def _print_ready(endpoints: Endpoints, desired: DesiredState, events: UpEvents, tasks: dict[str, list[str]]) -> None:
    served = [model.name for model in desired.models if model.name not in events.failed_models]
    path, body = _first_request(served, tasks)
    shown = listed(served, _MAX_NAMES_SHOWN)
    key = ' -H "Authorization: Bearer $NARU_API_KEY"' if endpoints.tenants_file is not None else ""
    if endpoints.more_http_urls:
        click.echo(f"more routers: {' '.join(endpoints.more_http_urls)}")
    click.echo(
        f"ready in {own_age_s():.2f} s: {shown} at {endpoints.http_url} (gRPC {endpoints.grpc_address}); "
        "Ctrl-C stops. Try:\n"
        f"curl {endpoints.http_url}{path} -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'"
    )


def _first_request(served: list[str], tasks: dict[str, list[str]]) -> tuple[str, dict[str, object]]:
    """Path and body of something to try: a chat, where a model may take one."""
    chatty = [name for name in served if "generate" in tasks.get(name, ["generate"])]
    if chatty:
        question = {"role": "user", "content": "Name the capital of France."}
        return "/v1/chat/completions", {"model": chatty[0], "messages": [question], "temperature": 0}
    first = served[0]
    if "embed" in tasks[first]:
        return "/v1/embeddings", {"model": first, "input": "Name the capital of France."}
    if "score" in tasks[first]:
        return "/v1/score", {"model": first, "text_1": "the capital of France", "text_2": ["Paris", "Rome"]}
    return "/v2/repository/index", {}


@contextlib.asynccontextmanager
async def _applying_edits(options: UpOptions, instance: LocalInstance, events: UpEvents) -> AsyncIterator[None]:
    """While the context lasts, a saved manifest is applied; a broken one changes nothing but the screen."""

    async def follow() -> None:
        try:
            async for _ in manifest_changes(options.paths):
                try:
                    instance.desire(_desired(options))
                except InvalidRequest as exc:
                    events.tell(f"error: {exc.message}\nthe manifests are not applied; what was applied last goes on")
        except InvalidRequest as exc:
            events.tell(f"warning: {exc.message}")

    task = asyncio.create_task(follow(), name="manifests")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
