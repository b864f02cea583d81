"""Beam search over real gRPC: one answer at the end, refused where it makes no sense, gone when its client is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from toy_worker import Exchange, RunningWorker, ToyLoader, ask, eventually, ids, running_worker, text
from worker_probes import hold

from naru_proto.v1 import inference_pb2, worker_pb2

LENGTH = inference_pb2.FINISH_REASON_LENGTH


async def is_idle(worker: RunningWorker) -> bool:
    [model] = (await worker.stub.Stats(worker_pb2.StatsRequest())).models
    return (model.num_running, model.num_waiting, model.num_free_blocks, len(worker.app.board)) == (
        0,
        0,
        model.num_blocks,
        0,
    )


async def test_choices_come_whole_at_the_end_with_what_was_asked_for() -> None:
    async with running_worker(None, None, "toy") as worker:
        deltas = await worker.generate(ask("r", beam_width=4, n=2, logprobs=1, prompt_logprobs=0, length_penalty=0.5))
        alone = await worker.generate(ask("one", beam_width=4))
    assert [(d.index, d.num_tokens, d.finish_reason, d.request_done) for d in deltas] == [
        (0, 12, LENGTH, False),
        (1, 12, LENGTH, True),
    ]
    assert deltas[-1].usage == inference_pb2.Usage(prompt_tokens=9, completion_tokens=24)
    for delta in deltas:
        assert [position.chosen.token_id for position in delta.logprobs] == list(delta.token_ids)
        assert delta.text == bytes(delta.token_ids).decode(errors="replace")
    assert [len(d.prompt_logprobs) for d in deltas] == [9, 0]
    sums = [sum(position.chosen.logprob for position in delta.logprobs) for delta in deltas]
    assert sums[0] >= sums[1]
    # Of equal lengths the penalty changes no order.
    assert ids(alone) == ids(deltas, 0)


async def test_the_answer_is_the_same_beside_others_that_push_it_out() -> None:
    async with running_worker(ToyLoader(num_blocks=81), None, "toy") as worker:
        router = Exchange(worker.stub)
        searches = [ask(f"b{i}", f"user {i}, " * (1 + i % 3), beam_width=2 + i, n=2, max_tokens=20) for i in range(5)]
        others = [ask(f"o{i}", "once upon " * (i % 4), max_tokens=60) for i in range(1, 9)]
        await router.send(*(each for pair in zip(others, searches, strict=False) for each in pair), *others[5:])
        await router.finish(*(each.request_id for each in (*searches, *others)))
        stats = (await worker.stub.Stats(worker_pb2.StatsRequest())).models[0]
        assert stats.num_preemptions > 0
        for search in searches:
            search.request_id, name = search.request_id + "-solo", search.request_id
            solo = await worker.generate(search)
            got = router.deltas[name]
            assert [(ids(got, i), text(got, i)) for i in (0, 1)] == [(ids(solo, i), text(solo, i)) for i in (0, 1)]
        assert await is_idle(worker)
        await router.close()


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "logit_bias": {5: 1.0}}, "logit_bias"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"beam_width": 2, "structured": inference_pb2.StructuredOutput(regex="a", param="guided")}, "guided"),
    ],
)
async def test_what_a_search_cannot_keep_is_refused_and_names_its_field(sampling: dict[str, Any], param: str) -> None:
    async with running_worker(None, None, "toy") as worker:
        [delta] = await worker.generate(ask("r", **sampling))
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", param)
        assert len(ids(await worker.generate(ask("next", beam_width=2)))) == 12


async def test_cancelled_expired_and_abandoned_searches_free_every_block() -> None:
    async with running_worker(ToyLoader(num_blocks=1000), None, "toy") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        late = ask("late", beam_width=8, max_tokens=200)
        late.timeout_s = 0.05
        await router.send(ask("gone", beam_width=8, n=3, max_tokens=200), late)
        await eventually(lambda: worker.engine().stats.num_running >= 8, "no search began")
        await router.send(cancel=("gone",))
        await router.finish("gone", "late")
        assert {d.finish_reason for d in router.deltas["gone"]} == {inference_pb2.FINISH_REASON_CANCELLED}
        assert {d.index for d in router.deltas["gone"]} == {0, 1, 2}
        assert router.deltas["late"][-1].error.code == "deadline_exceeded"
        await eventually(lambda: is_idle(worker), "blocks did not come back")
        abandoned = Exchange(worker.stub)
        await abandoned.send(ask("left", beam_width=8, max_tokens=240))
        await eventually(lambda: worker.engine().stats.num_running >= 8, "no search began")
        abandoned.break_off()
        await eventually(lambda: is_idle(worker), "blocks did not come back")
        await asyncio.wait_for(router.close(), 20)
