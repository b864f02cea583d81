"""Text of the real vocabulary over the real wire: characters and stop strings that no token has for itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from toy_worker import ask, ids, text
from worker_process import WorkerProcess, worker_process

from naru_proto.v1 import inference_pb2, worker_pb2

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(300)]

ODD_TEXT = "čaj žluť 🧑‍🚀 漢字 ﷽"
BROKEN = "\N{REPLACEMENT CHARACTER}"


async def generate(worker: WorkerProcess, request: worker_pb2.GenerateRequest) -> list[worker_pb2.Delta]:
    request.model = "m"
    deltas = [delta async for delta in worker.stub.Generate(request)]
    assert not deltas[-1].error.code, deltas[-1].error
    return deltas


async def test_characters_and_stops_over_several_tokens_are_told_whole_or_not_at_all(smollm2_path: Path) -> None:
    async with worker_process() as worker:
        options = worker_pb2.EngineOptions(max_model_len=512, kv_cache_bytes=32 * 2**20)
        load = worker_pb2.LoadRequest(model="m", uri=f"file://{smollm2_path}", options=options)
        assert [p async for p in worker.stub.Load(load)][-1].state == worker_pb2.MODEL_STATE_READY
        await _check_characters(worker)
        await _check_stops(worker)


async def _check_characters(worker: WorkerProcess) -> None:
    """A grammar of one text makes the model say it, in whichever tokens it likes."""
    choice = inference_pb2.StructuredOutput(choice=inference_pb2.Choices(texts=[ODD_TEXT]))
    forced: dict[str, Any] = {"structured": choice, "ignore_eos": False, "max_tokens": 200}
    deltas = await generate(worker, ask("whole", "Say: ", **forced))
    assert text(deltas) == ODD_TEXT
    assert len(ids(deltas)) > len(ODD_TEXT), "characters are split over tokens"
    assert all(BROKEN not in delta.text for delta in deltas)
    asks = [ask(f"cut{n}", "Say: ", **{**forced, "max_tokens": n}) for n in range(1, len(ids(deltas)))]
    for cut in await asyncio.gather(*(generate(worker, one) for one in asks)):
        told = text(cut)
        assert ODD_TEXT.startswith(told.removesuffix(BROKEN)), told
        assert told.count(BROKEN) <= 1
        assert all(BROKEN not in delta.text for delta in cut[:-1])


async def _check_stops(worker: WorkerProcess) -> None:
    whole = text(await generate(worker, ask("free", "The days of the week are Monday, Tuesday,", max_tokens=40)))
    for start, end in ((3, 22), (9, 30), (14, 40)):
        stop = whole[start:end]
        deltas = await generate(
            worker, ask(f"{start}", "The days of the week are Monday, Tuesday,", max_tokens=40, stop=[stop])
        )
        cut, told = whole[: whole.index(stop)], ""
        for delta in deltas:
            told += delta.text
            assert cut.startswith(told), "text that was to be withheld"
        assert told == cut
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (inference_pb2.FINISH_REASON_STOP, stop)
        assert len(ids(deltas)) >= 3
