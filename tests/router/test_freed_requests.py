"""What a request held is freed with its reply: none waits for the garbage collector, which looks rarely."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from compatibility.known_worker import FACTS, answer
from compatibility.row import Row
from compatibility.rows import ROWS
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, poll
from stub_worker import fail

from naru_proto.errors import NaruError
from naru_proto.v1 import inference_pb2, inference_pb2_grpc
from naru_router.adapters.grpc_edge import Call
from naru_router.adapters.http.messages import HttpRequest


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests have left needs no looking through
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def samples() -> Iterator[Row]:
    """Of each path one request that is served, one that is streamed, and one that is refused."""
    seen = set()
    for row in ROWS:
        is_stream = isinstance(row.body, dict) and row.body.get("stream") is True
        kind = (row.path, row.method, row.status, is_stream)
        if kind not in seen:
            seen.add(kind)
            yield row


async def send(rig: Rig, row: Row) -> None:
    method = row.method or ("GET" if row.body is None else "POST")
    if isinstance(row.body, bytes):
        await rig.client.request(method, row.path, content=row.body, headers=row.headers)
    else:
        await rig.client.request(method, row.path, json=row.body, headers=row.headers)


async def num_left() -> int:
    """Requests that are still in memory; a task that has just sent a reply has a moment to end.

    By their own types: `isinstance` would ask objects of other libraries what they are, and some warn.
    """
    for _ in range(50):
        await asyncio.sleep(0)
    return sum(issubclass(type(each), HttpRequest) for each in gc.get_objects())


async def test_no_request_is_left_to_the_garbage_collector(rig: Rig, tmp_path: Path, no_collector: None) -> None:
    for name in FACTS:
        await rig.publish_model(name)
    for name, facts in FACTS.items():
        await rig.start_worker(f"w-{name}", answer, models=(name,), facts=facts)
    await rig.start_router(files_dir=str(tmp_path))
    left = {}
    num_before = await num_left()
    for row in samples():
        await send(rig, row)
        num_after = await num_left()
        if num_after > num_before:
            left[f"{row.api}: {row.feature}"] = num_after - num_before
        num_before = num_after
    assert left == {}


async def test_a_request_that_its_worker_refuses_is_freed_too(rig: Rig, no_collector: None) -> None:
    await rig.publish_model()
    await rig.start_worker(script=fail("context_length_exceeded", param="prompt"))
    await rig.start_router()
    num_before = await num_left()
    for is_stream in (False, True):
        for path in (CHAT, COMPLETION):
            assert (await rig.post(path, body(path, stream=is_stream))).status_code == 400
    assert await num_left() == num_before


async def test_nothing_of_a_grpc_call_that_failed_is_left_to_the_garbage_collector(
    rig: Rig, no_collector: None
) -> None:
    await rig.publish_model()
    await rig.start_worker()
    await rig.start_router()
    wrong = inference_pb2.SamplingParams(top_p=7)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
                await stub.Generate(
                    inference_pb2.InferenceGenerateRequest(model=MODEL, prompt="x", sampling=wrong)
                ).read()

    async def is_free() -> bool:
        return not [each for each in gc.get_objects() if issubclass(type(each), (NaruError, Call))]

    await poll(is_free)
