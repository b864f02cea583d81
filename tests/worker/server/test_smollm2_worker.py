"""The real model over the real wire: text, memory pressure, cancellation, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toy_worker import Exchange, ask, ids, text
from worker_process import worker_process

from naru_proto.v1 import inference_pb2, worker_pb2

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(300)]


CHAT = "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n"


async def test_the_real_model_answers_and_describes_itself(smollm2_path: Path) -> None:
    async with worker_process() as worker:
        progress = [
            p
            async for p in worker.stub.Load(
                worker_pb2.LoadRequest(
                    model="smollm2",
                    uri=f"file://{smollm2_path}",
                    options=worker_pb2.EngineOptions(max_model_len=2048, kv_cache_bytes=96 * 2**20),
                )
            )
        ]
        assert progress[-1].state == worker_pb2.MODEL_STATE_READY
        (model,) = (await worker.stub.Describe(worker_pb2.DescribeRequest())).models
        assert (model.architecture, model.vocab_size, model.max_model_len) == ("llama", 49152, 2048)
        assert "<|im_start|>" in model.chat_template
        assert model.kv_bytes <= 96 * 2**20
        request = ask("r", CHAT, model="smollm2", max_tokens=32, ignore_eos=False)
        deltas = [d async for d in worker.stub.Generate(request)]
        assert "Paris" in text(deltas)
        assert deltas[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert "<|im_end|>" not in text(deltas)
        rss_bytes = (await worker.stub.Stats(worker_pb2.StatsRequest())).rss_bytes
        assert rss_bytes <= model.weight_bytes + model.kv_bytes + 150e6


async def test_many_requests_in_a_small_pool_equal_their_solo_output(smollm2_path: Path) -> None:
    def mixed(i: int) -> worker_pb2.GenerateRequest:
        prompt = f"{CHAT} " * (i % 2) + f"Number {i}. " + "Tell me a story about the sea. " * (1 + i % 4)
        more: dict[str, Any] = {"max_tokens": 8 + (i * 5) % 24}
        if i % 3 == 1:
            more |= {"temperature": 0.8, "seed": i, "top_p": 0.9}
        return ask(f"r{i}", prompt, model="smollm2", **more)

    requests = [mixed(i) for i in range(64)]
    cancelled = {f"r{i}" for i in range(0, 64, 3)}
    async with worker_process("--max-num-batched-tokens", "256") as worker:
        # 45 blocks of 16 tokens: about ten of these requests.
        load = worker_pb2.LoadRequest(
            model="smollm2",
            uri=f"file://{smollm2_path}",
            options=worker_pb2.EngineOptions(max_model_len=512, kv_cache_bytes=46 * 16 * 23040),
        )
        progress = [p async for p in worker.stub.Load(load)]
        assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]
        router = Exchange(worker.stub)
        await router.send(*requests)
        asked: set[str] = set()
        while not all(router.is_done(r.request_id) for r in requests):
            await router.read()
            midway = {r for r in cancelled - asked if len(ids(router.deltas.get(r, []))) >= 4}
            if midway:
                asked |= midway
                await router.send(cancel=tuple(sorted(midway)))
        (stats,) = (await worker.stub.Stats(worker_pb2.StatsRequest())).models
        assert stats.num_preemptions > 0
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
        # A sample of the greedy survivors: each solo run costs as much as a request in the batch did.
        survivors = [r for r in requests if r.request_id not in cancelled and not r.sampling.temperature][::3]
        for request in survivors:
            got = router.deltas[request.request_id]
            request.request_id += "-solo"
            solo = [d async for d in worker.stub.Generate(request)]
            assert ids(got) == ids(solo)
        await router.close()
