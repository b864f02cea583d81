"""The worker on this backend, under Triton's interpreter: what clients see."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu_offline, pytest.mark.timeout(600)]
pytest.importorskip("torch")
pytest.importorskip("triton")

from tiny_experts import write_experts  # noqa: E402
from tiny_models import TinySpec  # noqa: E402
from toy_worker import ask, ids  # noqa: E402
from worker_process import worker_process  # noqa: E402

from naru_proto.v1 import worker_pb2  # noqa: E402


@pytest.mark.parametrize("has_experts", [False, True])
async def test_a_worker_answers_as_the_reference_does(
    has_experts: bool, tiny_model: Callable[[TinySpec], Path], tmp_path: Path
) -> None:
    folder = tmp_path if has_experts else tiny_model(TinySpec(num_layers=1))
    if has_experts:
        write_experts(folder, "qwen3_moe")
    answers = []
    over_two = ("--num-accelerators", "2", "--tensor-parallel-size", "2")
    for flags in (("cuda",), ("cuda", *over_two), ("ref",)):
        async with worker_process("--backend", *flags) as worker:
            options = worker_pb2.EngineOptions(max_model_len=256, kv_cache_bytes=2**21)
            request = worker_pb2.LoadRequest(model="tiny", uri=f"file://{folder}", generation=1, options=options)
            progress = [each async for each in worker.stub.Load(request)]
            assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]
            runs = [[delta async for delta in worker.stub.Generate(ask(text, text, model="tiny"))] for text in "ab"]
            assert all(run[-1].request_done and not run[-1].error.code for run in runs)
            answers.append([ids(run) for run in runs])
            worker.signal(signal.SIGTERM)
            assert await worker.exit_code() == 0
    assert answers[0] == answers[1] == answers[2]
