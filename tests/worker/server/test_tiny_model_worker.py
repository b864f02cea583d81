"""Answers of a tiny real model through the real worker: cached, forked, chunked, preempted or in company: the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinySpec
from toy_worker import Exchange, ask, ids, text
from worker_process import WorkerProcess, worker_process

from naru_proto.v1 import worker_pb2

B = 16
"""Tokens of a block: the worker's default. The tiny tokenizer makes one token of each byte."""

TinyModel = Callable[[TinySpec], Path]


async def load(worker: WorkerProcess, name: str, folder: Path, generation: int = 1, **options: Any) -> None:
    request = worker_pb2.LoadRequest(
        model=name,
        uri=f"file://{folder}",
        generation=generation,
        options=worker_pb2.EngineOptions(**{"max_model_len": 256, "kv_cache_bytes": 2**21, **options}),
    )
    progress = [p async for p in worker.stub.Load(request)]
    assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]


async def generate(worker: WorkerProcess, request: worker_pb2.GenerateRequest) -> list[worker_pb2.Delta]:
    deltas = [d async for d in worker.stub.Generate(request)]
    assert deltas[-1].request_done and not deltas[-1].error.code, deltas[-1]
    return deltas


def prompt_of(length: int, seed: int = 0) -> str:
    return "".join(chr(97 + (i * i * 7 + i + seed * 5) % 26) for i in range(length))


async def test_an_answer_is_the_same_cold_cached_and_without_a_cache(tiny_model: TinyModel) -> None:
    folder = tiny_model(TinySpec())
    async with worker_process() as worker:
        await load(worker, "cached", folder)
        await load(worker, "plain", folder, enable_prefix_caching=False)
        for length in (B - 1, B, B + 1, 2 * B, 2 * B + 1, 5 * B + 3):
            prompt = prompt_of(length, length)
            runs = [
                await generate(worker, ask(f"{name}-{i}", prompt, model=name, logprobs=2))
                for name, i in (("cached", 0), ("cached", 1), ("cached", 2), ("plain", 0))
            ]
            assert [run[0].cached_tokens for run in runs] == [0, *[min(length // B * B, length - 1)] * 2, 0]
            assert all(ids(run) == ids(runs[0]) for run in runs)
            scores = [[p.chosen.logprob for d in run for p in d.logprobs] for run in runs]
            assert all(score == scores[0] for score in scores)


async def test_models_and_reloaded_weights_never_share_a_cache(tiny_model: TinyModel) -> None:
    one, other = tiny_model(TinySpec()), tiny_model(TinySpec(seed=1))
    prompt = prompt_of(3 * B)
    async with worker_process() as worker:
        await load(worker, "one", one)
        await load(worker, "other", other)
        first = await generate(worker, ask("a", prompt, model="one"))
        second = await generate(worker, ask("b", prompt, model="other"))
        assert second[0].cached_tokens == 0
        assert ids(first) != ids(second)
        await load(worker, "one", other, generation=2)
        again = await generate(worker, ask("c", prompt, model="one"))
        assert again[0].cached_tokens == 0
        assert ids(again) == ids(second)


async def test_prompt_scores_do_not_depend_on_what_is_cached(tiny_model: TinyModel) -> None:
    prompt = prompt_of(2 * B + 1)
    async with worker_process("--max-num-batched-tokens", "16") as worker:
        await load(worker, "m", tiny_model(TinySpec()))
        seen = []
        for name, text_before in (("cold", ""), ("cached", ""), ("half", prompt[:B] + "zzz")):
            if text_before:
                await generate(worker, ask("between", text_before, model="m"))
            deltas = await generate(worker, ask(name, prompt, model="m", prompt_logprobs=2, max_tokens=1))
            positions = [p for d in deltas for p in d.prompt_logprobs]
            assert len(positions) == len(prompt)
            seen.append([(p.chosen.token_id, p.chosen.logprob) for p in positions])
        assert seen[0] == seen[1] == seen[2]


async def test_choices_equal_their_solo_runs_and_differ_from_each_other(tiny_model: TinyModel) -> None:
    async with worker_process() as worker:
        await load(worker, "m", tiny_model(TinySpec()))
        for length in (B - 1, B, 2 * B + 3):
            prompt = prompt_of(length, 3)
            alone = await generate(worker, ask(f"alone-{length}", prompt, model="m", max_tokens=20))
            greedy = await generate(worker, ask(f"greedy-{length}", prompt, model="m", n=3, max_tokens=20))
            assert [ids(greedy, i) for i in range(3)] == [ids(alone)] * 3
            drawn = [
                await generate(worker, ask(f"{i}-{length}", prompt, model="m", n=3, temperature=1.0, seed=7))
                for i in range(2)
            ]
            choices = [tuple(ids(drawn[0], i)) for i in range(3)]
            assert len(set(choices)) == 3  # equal by chance: below 1e-9 with twelve tokens of near-uniform logits
            assert choices == [tuple(ids(drawn[1], i)) for i in range(3)]


@pytest.mark.parametrize("backwards", [False, True])
async def test_company_preemption_and_order_change_no_answer(tiny_model: TinyModel, backwards: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.8},
        {"temperature": 1.0, "top_k": 1, "seed": 5},
        {"temperature": 0.9, "seed": 42},
        {"temperature": 0.9, "seed": 42, "top_p": 0.5},
        {"temperature": 1.0, "seed": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 1.3, "seed": 9, "min_p": 0.1, "n": 2},
    ]
    requests = [
        ask(f"r{i}", prompt_of(2 * B + 3, i), model="m", max_tokens=4 * B, **kind) for i, kind in enumerate(kinds)
    ]
    folder = tiny_model(TinySpec())
    async with worker_process() as worker:
        await load(worker, "m", folder)
        solo = {r.request_id: await generate(worker, r) for r in requests}
    async with worker_process("--max-num-batched-tokens", "24") as worker:
        await load(worker, "m", folder)
        (model,) = (await worker.stub.Describe(worker_pb2.DescribeRequest())).models
        # Room for about three of them at their longest.
        small = 20 * (model.kv_bytes // model.num_blocks)
        await load(worker, "m", folder, generation=2, kv_cache_bytes=small, max_model_len=8 * B)
        router = Exchange(worker.stub)
        await router.send(*(reversed(requests) if backwards else requests))
        while not all(router.is_done(r.request_id) for r in requests):
            await router.read()
        await router.close()
        (stats,) = (await worker.stub.Stats(worker_pb2.StatsRequest())).models
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    for request in requests:
        together, alone = router.deltas[request.request_id], solo[request.request_id]
        for index in range(request.sampling.n or 1):
            assert ids(together, index) == ids(alone, index), request
            assert text(together, index) == text(alone, index)
        assert together[-1].usage.completion_tokens == alone[-1].usage.completion_tokens
