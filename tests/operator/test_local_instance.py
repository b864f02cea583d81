"""A whole instance with a real Redis and small programs as router and worker: start, failure, restart, end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import fake_parts
import psutil
import pytest

from naru_operator.adapters import local_processes
from naru_operator.adapters.child_process import ProcessSpec
from naru_operator.adapters.log_file import LogFile
from naru_operator.adapters.ports import free_ports
from naru_operator.adapters.redis_server import find_redis_server, redis_url
from naru_operator.adapters.route_map import RouteMap
from naru_operator.adapters.router_probe import listed_models
from naru_operator.cli.local_instance import Endpoints, LocalInstance
from naru_operator.cli.up_events import UpEvents
from naru_operator.core.desired import DesiredModel, DesiredPool, DesiredState, EngineLimits, Residency, Tier
from naru_proto.errors import LoadError, Unavailable
from naru_proto.registry import ModelRecord

PROGRAM = str(Path(fake_parts.__file__))
MODEL = DesiredModel("tiny", "pypi://x", "", (), 1, ("p",), EngineLimits())
DESIRED = DesiredState((MODEL,), (DesiredPool("p", 1, None, None, 5.0),))


class Screen:
    """What the person would see."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.phases: list[str] = []

    def update(self, what: str, phase: str, done: int, total: int) -> None:
        self.phases.append(f"{what}: {phase}")

    def message(self, text: str) -> None:
        self.messages.append(text)


class Rig:
    def __init__(self, folder: Path, log: LogFile, other_redis: str = "", num_routers: int = 1) -> None:
        self.screen = Screen()
        self.log = folder / "naru.log"
        program = None if other_redis else find_redis_server()
        http_port, grpc_port, *more = free_ports("127.0.0.1", 2 * num_routers)
        pairs = tuple(zip(more[::2], more[1::2], strict=True))
        self.endpoints = Endpoints("127.0.0.1", http_port, grpc_port, folder, pairs)
        events = UpEvents(self.screen, log, is_verbose=False)
        self.instance = LocalInstance(
            self.endpoints, events, redis_program=program, redis_url=other_redis or redis_url(folder)
        )

    async def start(self, desired: DesiredState = DESIRED) -> None:
        async with asyncio.timeout(60):
            await self.instance.start(desired)
            await self.instance.wait_ready(desired)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the screen has no event
                await asyncio.sleep(0.02)

    def lines(self, part: str) -> list[str]:
        prefix = f"{part} | "
        return [line.removeprefix(prefix) for line in self.log.read_text().splitlines() if line.startswith(prefix)]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """How the programs behave; a test may change it before the start."""
    how = {"router": "", "load error": ""}

    def router(
        name: str,
        url: str,
        host: str,
        http_port: int,
        grpc_port: int,
        tenants: Path | None = None,
        files: Path | None = None,
    ) -> ProcessSpec:
        code = how["router"]
        argv = ("-c", code) if code else (PROGRAM, "router", str(http_port), "tiny")
        return ProcessSpec(name, (sys.executable, *argv))

    def worker(worker_id: str, pool: DesiredPool, url: str) -> ProcessSpec:
        return ProcessSpec(worker_id, (sys.executable, PROGRAM, "worker", worker_id, url, how["load error"]))

    monkeypatch.setattr(local_processes, "router_process", router)
    monkeypatch.setattr(local_processes, "worker_process", worker)
    return how


@contextlib.asynccontextmanager
async def rigged(folder: Path, other_redis: str = "", num_routers: int = 1) -> AsyncIterator[Rig]:
    before = set(psutil.Process().children())
    with LogFile(folder) as log:
        rig = Rig(folder, log, other_redis, num_routers)
        try:
            yield rig
        finally:
            await rig.instance.stop()
        assert set(psutil.Process().children()) == before


async def test_it_is_ready_when_the_model_is_and_ends_from_the_outside_in(
    parts: dict[str, str], tmp_path: Path
) -> None:
    async with rigged(tmp_path) as rig:
        await rig.start()
        # The lease may say that it is ready before the load's own answer has arrived.
        await rig.until(lambda: "tiny on p-0: ready" in rig.screen.phases)
        assert rig.screen.phases == ["tiny on p-0: fetching", "tiny on p-0: ready"]
        assert rig.screen.messages == []
    ends = [
        line for line in rig.log.read_text().splitlines() if "stopped" in line or "Redis is now ready to exit" in line
    ]
    assert [line.partition(" | ")[0] for line in ends] == ["router", "p-0", "redis"]
    assert not (tmp_path / "redis.sock").exists()


async def test_models_on_demand_are_ready_when_a_worker_knows_them(parts: dict[str, str], tmp_path: Path) -> None:
    tiny = dataclasses.replace(MODEL, residency=Residency(Tier.COLD))
    async with rigged(tmp_path) as rig:
        await rig.start(dataclasses.replace(DESIRED, models=(tiny,)))
        assert rig.screen.phases == rig.screen.messages == []
    assert "make known 'tiny' in generation 1 on 'p-0': it does not know it" in rig.lines("plan")


async def test_a_killed_worker_comes_back_with_its_model(parts: dict[str, str], tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.start()
        (worker,) = (child for child in psutil.Process().children() if "p-0" in child.cmdline())
        os.kill(worker.pid, signal.SIGKILL)
        await rig.until(lambda: rig.screen.phases.count("tiny on p-0: ready") >= 2)
        assert any("p-0 was ended by SIGKILL; it starts again in 0.25 s" in text for text in rig.screen.messages)


async def test_a_router_that_cannot_run_ends_the_start_with_its_last_lines(
    parts: dict[str, str], tmp_path: Path
) -> None:
    parts["router"] = "raise SystemExit('bad setting')"
    async with rigged(tmp_path) as rig:
        with pytest.raises(Unavailable, match=r"router ended with exit code 1 before it was ready"):
            await rig.start()
        assert "  router | bad setting" in rig.screen.messages


async def test_all_of_several_routers_serve_when_it_is_ready_and_end_with_it(
    parts: dict[str, str], tmp_path: Path
) -> None:
    async with rigged(tmp_path, num_routers=3) as rig:
        await rig.start()
        assert len(rig.endpoints.more_http_urls) == 2
        for http_port, _ in rig.endpoints.ports.values():
            assert await listed_models("127.0.0.1", http_port) == {"tiny"}
    stopped = [line.partition(" | ")[0] for line in rig.log.read_text().splitlines() if "router stopped" in line]
    assert sorted(stopped) == ["router", "router#2", "router#3"]


async def test_a_second_router_that_cannot_run_ends_the_start(parts: dict[str, str], tmp_path: Path) -> None:
    async with rigged(tmp_path, num_routers=2) as rig:
        taken = rig.endpoints.more_ports[0][0]
        with socket.create_server(("127.0.0.1", taken)):
            with pytest.raises(Unavailable, match=r"router#2 ended with exit code 1 before it was ready"):
                await rig.start()


async def test_a_model_that_cannot_load_ends_the_start_with_the_reason(parts: dict[str, str], tmp_path: Path) -> None:
    parts["load error"] = "no such file"
    async with rigged(tmp_path) as rig:
        with pytest.raises(LoadError, match=r"^no such file$"):
            await rig.start()
        assert "error: model 'tiny' on p-0: no such file" in rig.screen.messages


async def test_a_cancelled_start_leaves_nothing(parts: dict[str, str], tmp_path: Path) -> None:
    parts["router"] = "import signal; signal.pause()"
    async with rigged(tmp_path) as rig:
        start = asyncio.create_task(rig.start())
        await rig.until(lambda: "tiny on p-0: ready" in rig.screen.phases)
        assert not start.done()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start


async def test_somebody_elses_redis_is_left_running_and_clean(
    parts: dict[str, str], tmp_path: Path, redis_server_url: str, route_map: RouteMap
) -> None:
    await route_map.write_models([ModelRecord("old", "pypi://old", 1)], [])
    async with rigged(tmp_path, redis_server_url) as rig:
        await rig.start()
        assert set((await route_map.read()).models) == {"tiny"}
        assert rig.lines("redis") == []
    assert (await route_map.read()).models == {}


def test_addresses_are_those_that_work_from_here() -> None:
    assert Endpoints("0.0.0.0", 1, 2, Path()).http_url == "http://127.0.0.1:1"
    assert Endpoints("::", 1, 2, Path()).grpc_address == "[::1]:2"
    assert Endpoints("192.0.2.1", 1, 2, Path()).http_url == "http://192.0.2.1:1"


def test_a_worker_is_started_with_what_its_pool_says() -> None:
    bare = local_processes.worker_process("p-0", DesiredPool("p", 1, None, None, 5.0), "unix:///r").argv
    full = local_processes.worker_process("p-0", DesiredPool("p", 1, 3, 7, 5.0, 0, (0.5, 0.9)), "unix:///r").argv
    assert full[: len(bare)] == bare
    assert " ".join(full[len(bare) :]) == (
        "--num-threads 3 --memory-budget-bytes 7 --host-budget-bytes 0 --low-watermark 0.5 --high-watermark 0.9"
    )
