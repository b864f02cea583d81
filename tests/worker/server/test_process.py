"""The process as a whole: start, signals, parents, ports; tiny models on the native backend."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis_server import RedisServer
from tiny_models import TinySpec
from toy_worker import ask, eventually, ids
from worker_process import WorkerProcess, spawn, worker_process

from naru_proto import names
from naru_proto.registry import WorkerRecord
from naru_proto.v1 import worker_pb2

Tiny = Callable[[TinySpec], Path]
LONG = TinySpec(max_positions=4096)


@pytest.fixture
def model_flag(tiny_model: Tiny) -> tuple[str, str]:
    return ("--load", f"toy=file://{tiny_model(LONG)}")


async def generate(worker: WorkerProcess, request: worker_pb2.GenerateRequest) -> list[worker_pb2.Delta]:
    return [delta async for delta in worker.stub.Generate(request)]


async def test_a_signal_lets_requests_finish_and_ends_with_zero(model_flag: tuple[str, str]) -> None:
    async with worker_process(*model_flag) as worker:
        await worker.line("loaded toy")
        call = worker.stub.Generate(ask("r", max_tokens=400))
        stream = aiter(call)
        deltas = [await anext(stream)]
        worker.signal(signal.SIGTERM)
        deltas += [delta async for delta in stream]
        assert len(ids(deltas)) == 400
        assert deltas[-1].request_done
        assert await worker.exit_code() == 0
        with pytest.raises(OSError, match=r".*"):
            socket.create_connection(("127.0.0.1", int(worker.address.rpartition(":")[2])), timeout=1)


async def test_what_outlasts_the_drain_is_told_so(model_flag: tuple[str, str]) -> None:
    async with worker_process(*model_flag, "--drain-timeout-s", "0.05") as worker:
        await worker.line("loaded toy")
        call = worker.stub.Generate(ask("r", max_tokens=4000))
        stream = aiter(call)
        deltas = [await anext(stream)]
        worker.signal(signal.SIGTERM)
        deltas += [delta async for delta in stream]
        assert deltas[-1].error.code == "service_unavailable"
        assert deltas[-1].error.retryable
        assert await worker.exit_code() == 0


async def test_a_second_signal_ends_at_once(model_flag: tuple[str, str]) -> None:
    async with worker_process(*model_flag, "--drain-timeout-s", "600") as worker:
        await worker.line("loaded toy")
        call = worker.stub.Generate(ask("r", max_tokens=4000))
        stream = aiter(call)
        await anext(stream)
        worker.signal(signal.SIGTERM)

        async def is_draining() -> bool:
            return bool((await worker.stub.Describe(worker_pb2.DescribeRequest())).draining)

        await eventually(is_draining, "the first signal does nothing")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 1
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stream:
                pass


async def test_a_worker_does_not_outlive_its_parent() -> None:
    code = (
        "import subprocess, sys\n"
        "flags = ['--listen', '127.0.0.1:0', '--metrics-listen', 'off', '--exit-with-parent']\n"
        "command = [sys.executable, '-m', 'naru_worker', *flags]\n"
        "p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "print(p.pid, p.stdout.readline(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    line = (await parent.stdout.readline()).decode()
    pid = int(line.split()[0])
    assert "ready" in line
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_running(pid), "the worker lives on")


def is_running(pid: int) -> bool:
    """A zombie that nobody has waited for does not run."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_a_port_in_use_is_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flags in (
            ("--listen", address, "--metrics-listen", "off"),
            ("--listen", "127.0.0.1:0", "--metrics-listen", address),
        ):
            process = await spawn(*flags)
            _, err = await process.communicate()
            assert process.returncode == 1
            last = err.decode().strip().splitlines()[-1]
            assert address in last
            assert "--" in last
            assert "Traceback" not in err.decode()


async def test_a_bad_setting_is_a_sentence() -> None:
    process = await spawn("--num-threads", "lots")
    out, err = await process.communicate()
    assert process.returncode == 2
    assert out == b""
    assert err.decode().strip() == "naru-worker: --num-threads is 'lots'; it must be a whole number"


async def test_a_model_that_cannot_be_loaded_leaves_the_worker_running(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but not really")
    async with worker_process("--load", f"broken=file://{tmp_path}") as worker:

        async def is_failed() -> bool:
            models = (await worker.stub.Describe(worker_pb2.DescribeRequest())).models
            return any(m.state == worker_pb2.MODEL_STATE_FAILED and "model.gguf" in m.error.message for m in models)

        await eventually(is_failed, "the load does not fail")
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_a_killed_workers_lease_expires(redis_server: RedisServer) -> None:
    async with worker_process("--redis-url", redis_server.url, "--worker-id", "w9", "--lease-ttl-s", "0.5") as worker:
        key = names.key_worker("w9")
        await eventually(lambda: bool(redis_server.client.exists(key)), "no lease")
        record = WorkerRecord.from_json(str(redis_server.client.get(key)))
        assert record.address == worker.address
        os.kill(worker.process.pid, signal.SIGKILL)
        await eventually(lambda: not redis_server.client.exists(key), "the lease of a dead worker stays")


async def test_native_output_survives_load_prefix_hits_and_batching(
    tiny_model: Tiny, model_flag: tuple[str, str]
) -> None:
    async with worker_process(*model_flag) as worker:
        await worker.line("loaded toy")
        prompt = "a prompt of more than two blocks, so that some of it is found again"
        cold = await generate(worker, ask("cold", prompt, max_tokens=24, logprobs=1))
        warm = await generate(worker, ask("warm", prompt, max_tokens=24, logprobs=1))
        assert cold[-1].usage.cached_tokens == 0
        assert warm[-1].usage.cached_tokens >= 32
        assert ids(warm) == ids(cold)
        seeded: dict[str, Any] = {"temperature": 1.0, "seed": 42, "max_tokens": 24}
        alone = await generate(worker, ask("alone", "seeded", **seeded))
        together = await asyncio.gather(
            *(generate(worker, ask(f"o{i}", f"other {i}", temperature=1.5, max_tokens=30)) for i in range(7)),
            generate(worker, ask("again", "seeded", **seeded)),
        )
        assert ids(together[-1]) == ids(alone)
        other = tiny_model(TinySpec(seed=9, max_positions=4096))
        progress = [
            p async for p in worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri=f"file://{other}", generation=1))
        ]
        assert progress[-1].state == worker_pb2.MODEL_STATE_READY
        changed = await generate(worker, ask("changed", prompt, max_tokens=24))
        assert changed[-1].usage.cached_tokens == 0
        assert ids(changed) != ids(cold)
