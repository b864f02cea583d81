"""The process `naru-router`: its start, its drain, its settings, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields
from typing import Any

import httpx
import psutil
import pytest
from router_rig import CHAT, COMPLETION, Rig, body, events, poll
from stub_worker import STOP, hang, usage

from naru_proto.settings import SettingsError
from naru_proto.v1 import worker_pb2 as wire
from naru_router.settings import Settings, field_docs, load_settings


@dataclass
class Router:
    process: asyncio.subprocess.Process
    url: str


Start = Callable[..., Any]


@pytest.fixture
async def start(rig: Rig) -> AsyncIterator[Start]:
    """Starts router processes; none is left at the end."""
    processes: list[asyncio.subprocess.Process] = []

    async def start_one(*flags: str) -> Router:
        arguments = ["--http-port=0", "--grpc-port=0", f"--redis-url={rig.redis_url}", *flags]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "naru_router", *arguments, stdout=asyncio.subprocess.PIPE
        )
        processes.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("naru-router ready: http://127.0.0.1:") and " grpc 127.0.0.1:" in line
        return Router(process, line.split()[2])

    yield start_one
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ready(client: httpx.AsyncClient, num_connected: int) -> None:
    async def is_connected() -> bool:
        return bool((await client.get("/readyz")).json()["workers"]["connected"] >= num_connected)

    await poll(is_connected)


async def test_sigterm_lets_running_requests_finish(rig: Rig, start: Start) -> None:
    release = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(text="a", num_tokens=1)
        await release.wait()
        yield wire.Delta(text="b", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)

    await rig.publish_model()
    worker = await rig.start_worker(script=script)
    router = await start()
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        await ready(client, 1)
        running = asyncio.create_task(client.post(CHAT, json=body(CHAT, stream=True)))
        await worker.until(lambda: bool(worker.requests))
        router.process.send_signal(signal.SIGTERM)

        async def is_draining() -> bool:
            page = await client.get("/readyz")
            return page.status_code == 503 and page.json()["status"] == "draining"

        await poll(is_draining)
        refused = await client.post(CHAT, json=body(CHAT))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        release.set()
        assert events((await running).content)[-1] == "[DONE]"
        async with asyncio.timeout(20):
            assert await router.process.wait() == 0


async def test_requests_are_served_while_balancers_learn_that_it_leaves(rig: Rig, start: Start) -> None:
    await rig.publish_model()
    worker = await rig.start_worker()
    router = await start("--leave-delay-s=1000")
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        await ready(client, 1)
        kept = await client.post(CHAT, json=body(CHAT))
        assert "connection" not in kept.headers
        router.process.send_signal(signal.SIGTERM)

        async def is_unready() -> bool:
            return (await client.get("/ready")).status_code == 503

        await poll(is_unready)
        late = await client.post(CHAT, json=body(CHAT))
        assert late.status_code == 200 and late.headers["connection"] == "close"
        assert len(worker.requests) == 2


async def test_probes_are_answered_beside_hundreds_of_streams(rig: Rig, start: Start) -> None:
    num_streams = 500

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        while True:
            yield wire.Delta(text="token ", num_tokens=1)
            await asyncio.sleep(0.2)

    await rig.publish_model()
    worker = await rig.start_worker(script=script)
    router = await start()
    limits = httpx.Limits(max_connections=num_streams + 10)
    async with httpx.AsyncClient(base_url=router.url, timeout=60, limits=limits) as client:
        await ready(client, 1)
        streams = [
            asyncio.create_task(client.post(COMPLETION, json=body(COMPLETION, stream=True))) for _ in range(num_streams)
        ]
        await worker.until(lambda: len(worker.running) == num_streams, timeout_s=60)
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as probe:
            for path in ("/health", "/ready", "/healthz"):
                assert (await probe.get(path)).status_code == 200
        assert len(worker.running) == num_streams
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_the_drain_deadline_ends_requests_with_an_error(rig: Rig, start: Start) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(script=hang("tok"))
    router = await start("--drain-timeout-s=0.1")
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        await ready(client, 1)
        streamed = asyncio.create_task(client.post(CHAT, json=body(CHAT, stream=True)))
        whole = asyncio.create_task(client.post(COMPLETION, json=body(COMPLETION)))
        await worker.until(lambda: len(worker.running) == 2)
        router.process.send_signal(signal.SIGTERM)
        assert (await whole).status_code == 503
        last = events((await streamed).content)[-1]
        assert last["error"]["code"] == "service_unavailable"
        async with asyncio.timeout(20):
            assert await router.process.wait() == 0
    await worker.until(lambda: not worker.running)


async def test_it_ends_with_its_parent(rig: Rig) -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'naru_router', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(1000)"
    )
    arguments = ["--http-port=0", "--grpc-port=0", f"--redis-url={rig.redis_url}", "--exit-with-parent"]
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()

    async def has_ended() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    await poll(has_ended)


async def run(*flags: str, **environment: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "naru_router", *flags, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    async with asyncio.timeout(60):
        _, error = await process.communicate()
    return process.returncode, error.decode()


async def test_a_port_in_use_is_a_sentence(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = await run(f"--http-port={port}", "--grpc-port=0")
        assert status == 2 and error.count("\n") == 1
        assert f"127.0.0.1:{port}" in error and "--http-port" in error
        status, error = await run(f"--grpc-port={port}", "--http-port=0")
        assert status == 2 and f"127.0.0.1:{port}" in error and "Traceback" not in error


async def test_a_redis_url_that_cannot_be_read_is_a_sentence() -> None:
    status, error = await run("--redis-url=redis://host:port/0", "--http-port=0", "--grpc-port=0")
    assert status == 2 and error.count("\n") == 1 and "redis_url" in error


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--http-port=x"], {}, "--http-port is 'x'"),
        (["--http-port=70000"], {}, "http_port is 70000"),
        (["--load-factor=0.5"], {}, "load_factor is 0.5"),
        (["--load-factor=nan"], {}, "load_factor is nan"),
        (["--log-level=loud"], {}, "log_level is 'loud'"),
        (["--redis-url=http://me:secret@x"], {}, "redis_url is 'http://…'"),
        ([], {"NARU_ROUTER_MODEL_WAIT_S": "soon"}, "NARU_ROUTER_MODEL_WAIT_S is 'soon'"),
        ([], {"NARU_ROUTER_EXIT_WITH_PARENT": "maybe"}, "NARU_ROUTER_EXIT_WITH_PARENT is 'maybe'"),
        ([], {"NARU_ROUTER_MAX_BODY_BYTES": "0"}, "max_body_bytes is 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_text(flags: list[str], environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match="it must be") as caught:
        load_settings(flags, environment)
    assert message in str(caught.value)


def test_flags_win_over_the_environment() -> None:
    environment = {"NARU_ROUTER_HTTP_PORT": "1", "NARU_ROUTER_GRPC_PORT": "2", "NARU_ROUTER_EXIT_WITH_PARENT": "true"}
    settings = load_settings(["--http-port", "3", "--model-wait-s=1.5"], environment)
    assert (settings.http_port, settings.grpc_port, settings.model_wait_s) == (3, 2, 1.5)
    assert settings.exit_with_parent and settings.host == Settings().host


def test_every_setting_is_explained() -> None:
    docs = field_docs()
    assert list(docs) == [field.name for field in fields(Settings)]
    assert all(len(text) > 10 for text in docs.values())


async def child_pids(router: Router) -> set[int]:
    return {child.pid for child in psutil.Process(router.process.pid).children()}


def free_pair() -> int:
    """A free port whose successor is free as well; below those that outgoing connections take."""
    while True:
        port = random.randrange(15_000, 30_000, 2)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue


async def test_several_processes_serve_one_port_and_one_that_dies_is_started_again(rig: Rig, start: Start) -> None:
    await rig.publish_model()
    worker = await rig.start_worker()
    process_port = free_pair()
    router = await start("--num-processes=2", f"--process-port={process_port}")

    async def answers(index: int) -> bool:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process_port + index}", timeout=10) as client:
                page = await client.get("/readyz")
                return bool(page.json()["workers"]["connected"])
        except httpx.HTTPError:
            return False

    for index in range(2):
        await poll(lambda index=index: answers(index))  # type: ignore[misc]
    before = await child_pids(router)
    assert len(before) == 2
    for _ in range(20):  # each on a connection of its own, dealt out by the kernel
        async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
            assert (await client.post(CHAT, json=body(CHAT))).status_code == 200
    served = []
    for index in range(2):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process_port + index}", timeout=10) as client:
            text = (await client.get("/metrics")).text
            served.append('naru_router_requests_total{endpoint="chat",model="tiny-a",status="200"}' in text)
    assert served == [True, True]

    victim = before.pop()
    os.kill(victim, signal.SIGKILL)

    async def is_back() -> bool:
        now = await child_pids(router)
        return victim not in now and len(now) == 2 and await answers(0) and await answers(1)

    await poll(is_back)
    assert before < await child_pids(router)
    router.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await router.process.wait() == 0
    assert len(worker.requests) == 20


async def test_several_processes_drain_together(rig: Rig, start: Start) -> None:
    release = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await release.wait()
        yield wire.Delta(text="b", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)

    await rig.publish_model()
    worker = await rig.start_worker(script=script)
    router = await start("--num-processes=2")
    async with httpx.AsyncClient(base_url=router.url, timeout=30) as client:
        running = asyncio.create_task(client.post(CHAT, json=body(CHAT)))
        await worker.until(lambda: bool(worker.requests))
        router.process.send_signal(signal.SIGTERM)

        async def has_idle_one_left() -> bool:
            return len(await child_pids(router)) == 1

        await poll(has_idle_one_left)
        assert not running.done()
        release.set()
        assert (await running).status_code == 200
    async with asyncio.timeout(30):
        assert await router.process.wait() == 0


async def test_several_processes_say_in_a_sentence_what_is_wrong(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = await run("--num-processes=2", f"--http-port={port}", "--grpc-port=0")
        assert status == 2 and f"127.0.0.1:{port}" in error and "--http-port" in error and "Traceback" not in error
        status, error = await run("--num-processes=2", "--http-port=0", "--grpc-port=0", f"--process-port={port}")
        assert status == 2 and "--process-port" in error and "Traceback" not in error
