"""A worker over two ranks: the answers of one process, its memory, and what becomes of its streams when one is lost.

Starting processes with torch takes seconds, so there is one such worker, which ends with the loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

# A busy machine takes long to import torch in three processes.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
pytest.importorskip("torch")

from redis_server import RedisServer  # noqa: E402
from tiny_encoders import TinyEncoder, write_encoder  # noqa: E402
from tiny_models import TinySpec  # noqa: E402
from toy_worker import ask, eventually, ids  # noqa: E402
from worker_process import WorkerProcess, worker_process  # noqa: E402

from naru_proto import names  # noqa: E402
from naru_proto.placement.facts import slots_of  # noqa: E402
from naru_proto.placement.room import room_bytes  # noqa: E402
from naru_proto.registry import FootprintRecord, ModelRecord, WorkerRecord  # noqa: E402
from naru_proto.v1 import worker_pb2  # noqa: E402
from naru_router.app import build  # noqa: E402
from naru_router.settings import Settings  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.follower_process import MODULE  # noqa: E402

Tiny = Callable[[TinySpec], Path]
SPEC = TinySpec(num_heads=8, num_kv_heads=4, max_positions=1024)
PROMPTS = ("a", "x" * 300)
"""The second is computed in two pieces, of which the first has no logits."""


async def load(worker: WorkerProcess, model: str, folder: Path, **options: Any) -> worker_pb2.LoadProgress:
    request = worker_pb2.LoadRequest(
        model=model, uri=f"file://{folder}", generation=1, options=worker_pb2.EngineOptions(**options)
    )
    *_, last = await _all(worker.stub.Load(request))
    assert isinstance(last, worker_pb2.LoadProgress)
    return last


async def answers(worker: WorkerProcess, model: str) -> list[list[int]]:
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 3})
    requests = [
        ask(f"{model} {i} {text[:1]}", text, model=model, max_tokens=12, **kind)
        for i, kind in enumerate(kinds)
        for text in PROMPTS
    ]
    found = await asyncio.gather(*(_all(worker.stub.Generate(request)) for request in requests))
    assert all(deltas[-1].request_done and not deltas[-1].error.code for deltas in found)
    return [ids(deltas) for deltas in found]


async def _all(stream: Any) -> list[Any]:
    return [message async for message in stream]


def lease(server: RedisServer, worker_id: str) -> WorkerRecord | None:
    raw = server.client.get(names.key_worker(worker_id))
    return None if raw is None else WorkerRecord.from_json(str(raw))


def followers(worker: WorkerProcess) -> list[int]:
    """Processes of its other ranks."""
    pid = worker.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children if b"tensor_parallel" in Path(f"/proc/{each}/cmdline").read_bytes()]


async def assert_refused(worker: WorkerProcess, tiny_model: Tiny, encoder: Path) -> None:
    odd = tiny_model(TinySpec(num_heads=3, num_kv_heads=3, head_dim=16))
    for folder, size, words in (
        (odd, 2, "num_heads is 3: the model cannot be split over 2 ranks; tensor_parallel_size must be a divisor"),
        (odd, 4, "tensor_parallel_size is 4, and this worker's num_accelerators is 2: write 1 or 2, or serve"),
        (encoder, 2, "tensor_parallel_size is 2, and only models that generate can be cut"),
    ):
        failed = await load(worker, f"{folder.name}{size}", folder, tensor_parallel_size=size)
        assert failed.state == worker_pb2.MODEL_STATE_FAILED
        assert words in failed.error.message


async def assert_bytes_are_those_of_each_accelerator(worker: WorkerProcess, server: RedisServer) -> None:
    models = {each.model: each for each in (await worker.stub.Describe(worker_pb2.DescribeRequest())).models}
    cut, whole = models["cut"], models["whole"]
    assert whole.weight_bytes / 2 < cut.weight_bytes < whole.weight_bytes, "embedding and norms are on both"
    assert cut.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    memory = (await worker.stub.Stats(worker_pb2.StatsRequest())).memory
    assert memory.weight_bytes == cut.weight_bytes + whole.weight_bytes
    await eventually(lambda: (found := lease(server, "a")) is not None and len(found.models) == 2, "no lease")
    found = lease(server, "a")
    assert found is not None
    assert (found.num_accelerators, found.budget_bytes) == (2, 2 * memory.budget_bytes)
    assert found.models["cut"].weight_bytes == 2 * cut.weight_bytes
    assert found.models["whole"].weight_bytes == whole.weight_bytes
    on_first = memory.weight_bytes + memory.kv_bytes + memory.workspace_bytes + memory.private_bytes
    on_second = on_first - whole.weight_bytes - whole.kv_committed_bytes - memory.private_bytes // 2
    assert found.used_bytes == on_first + on_second
    await eventually(lambda: len(server.client.hgetall(names.KEY_FOOTPRINTS)) == 3, "no footprints")
    told = {
        str(name): FootprintRecord.from_json(text) for name, text in server.client.hgetall(names.KEY_FOOTPRINTS).items()
    }
    entries = {name: ModelRecord(name, "", 1, num_accelerators=1 + (name == "cut")) for name in ("cut", "whole")}
    [slot] = slots_of({"a": found}, models=entries, footprints=told)
    left = room_bytes(slot, {}, (), 2)
    assert 0 <= 2 * (memory.budget_bytes - on_first) - left <= 8, (
        "placement sees what the first has left, but for roundings"
    )


async def test_two_ranks_answer_as_one_and_streams_outlive_the_loss_of_one(
    redis_server: RedisServer, tiny_model: Tiny, tmp_path: Path
) -> None:
    folder, encoder = tiny_model(SPEC), write_encoder(tmp_path / "encoder", TinyEncoder())
    common = ("--backend", "ref", "--redis-url", redis_server.url, "--worker-id")
    async with contextlib.AsyncExitStack() as stack:
        cutting = worker_process(*common, "a", "--num-accelerators", "2", "--tensor-parallel-size", "2",
                                 "--load", f"cut=file://{folder}")  # fmt: skip
        worker, other = await asyncio.gather(
            stack.enter_async_context(cutting), stack.enter_async_context(worker_process(*common, "b"))
        )
        await worker.line("loaded cut")
        for each, name in ((worker, "whole"), (other, "one")):
            done = await load(each, name, folder, tensor_parallel_size=1)
            assert done.state == worker_pb2.MODEL_STATE_READY, done
        expected = await answers(other, "one")
        assert await answers(worker, "cut") == expected
        assert await answers(worker, "whole") == expected
        await assert_bytes_are_those_of_each_accelerator(worker, redis_server)
        await assert_refused(worker, tiny_model, encoder)
        [pid] = followers(worker)
        assert await answer_while_a_rank_is_lost(redis_server, pid, other, folder) == await text_of(other)
        assert await worker.exit_code() == 1
        assert worker.process.stderr is not None
        log = (await worker.process.stderr.read()).decode()
        assert "rank 1 of 2 is lost: its process was ended by signal 9 (Killed); this worker ends" in log
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert lease(redis_server, "a") is None


def test_a_rank_that_stands_still_ends_with_its_worker() -> None:
    # No thread of it can notice by itself: the kernel ends it.
    code = (
        "import os, socket, subprocess, sys\n"
        "pairs = [socket.socketpair(), socket.socketpair()]\n"
        "ends = [pair[1].fileno() for pair in pairs]\n"
        f"command = [sys.executable, '-P', '-m', {MODULE!r}, *map(str, ends), '1', '2', str(os.getpid()), 'gloo']\n"
        "rank = subprocess.Popen(command, pass_fds=ends)\n"
        "assert pairs[0][0].recv(1), 'it has not started'\n"
        "print(rank.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        stopped = os.pidfd_open(pid)
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    assert select.select([stopped], [], [], 60)[0], "it lives on"
    os.close(stopped)


async def answer_while_a_rank_is_lost(server: RedisServer, pid: int, other: WorkerProcess, folder: Path) -> str:
    """The text of a stream that begins on a worker whose rank is killed, and goes on elsewhere."""
    record = ModelRecord(name="cut", uri=f"file://{folder}", generation=1, num_accelerators=2)
    server.client.hset(names.KEY_MODELS, "cut", record.to_json())
    router = build(Settings(http_port=0, grpc_port=0, redis_url=server.url))
    await router.start()
    try:
        async with asyncio.timeout(60):
            while not (router.registry.status.has_map and router.fleet.num_up() == 2):
                await router.fleet.changed(0.05)
        body = {"model": "cut", "prompt": "a", "max_tokens": 400, "temperature": 0, "stream": True}
        pieces: list[str] = []
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                if not pieces:
                    # It stands still until the model is ready elsewhere.
                    os.kill(pid, signal.SIGSTOP)
                    await load(other, "cut", folder)
                    await eventually(lambda: "cut" in lease_models(server, "b"), "not told")
                    os.kill(pid, signal.SIGKILL)
                pieces.append(event["choices"][0]["text"])
        return "".join(pieces)
    finally:
        await router.stop()


def lease_models(server: RedisServer, worker_id: str) -> set[str]:
    found = lease(server, worker_id)
    return set() if found is None else {name for name, each in found.models.items() if each.state == "ready"}


async def text_of(worker: WorkerProcess) -> str:
    request = ask("again", "a", model="cut", max_tokens=400, ignore_eos=False)
    deltas = await _all(worker.stub.Generate(request))
    assert len(ids(deltas)) > 50
    return "".join(delta.text for delta in deltas)
