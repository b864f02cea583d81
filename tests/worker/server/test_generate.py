"""Requests over real gRPC: both streams, exactly one end each, errors that hit nobody else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from toy_model import toy_logits
from toy_worker import (
    DEADLINE_S,
    Exchange,
    RunningWorker,
    ToyLoader,
    ask,
    eventually,
    ids,
    running_worker,
    text,
    toy_settings,
)
from worker_probes import hold

from naru_proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from naru_worker.adapters.server import admission


async def solo(worker: RunningWorker, request: worker_pb2.GenerateRequest) -> list[worker_pb2.Delta]:
    copy = worker_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.request_id += "-solo"
    copy.skip_prefix_cache = True
    return await worker.generate(copy)


async def is_idle(worker: RunningWorker) -> bool:
    reply = await worker.stub.Stats(worker_pb2.StatsRequest())
    return all(
        (m.num_running, m.num_waiting, m.num_free_blocks) == (0, 0, m.num_blocks) for m in reply.models
    ) and not len(worker.app.board)


async def test_tokens_that_come_fast_leave_together_and_nothing_is_lost() -> None:
    settings = toy_settings()
    paced = replace(settings, engine=replace(settings.engine, stream_interval_s=30.0))
    request = ask("r", "hello", max_tokens=40, logprobs=1)
    async with running_worker(None, settings, "toy") as worker:
        alone = await worker.generate(request)
    async with running_worker(None, paced, "toy") as worker:
        together = await worker.generate(request)
    assert [d.num_tokens for d in alone] == [1] * 40
    assert [d.num_tokens for d in together] == [1, 39], "the first token at once, the others with the end"
    assert (ids(together), text(together)) == (ids(alone), text(alone))
    assert [p for d in together for p in d.logprobs] == [p for d in alone for p in d.logprobs]
    assert together[-1].usage == alone[-1].usage


async def test_generate_streams_token_by_token_and_ends_once() -> None:
    async with running_worker(None, None, "toy") as worker:
        deltas = await worker.generate(ask("r", "hello", max_tokens=6))
    assert [d.num_tokens for d in deltas] == [1] * 6
    context = tuple(b"hello")
    for token_id in ids(deltas):
        expected = toy_logits(context, "toy://a")
        expected[258:] = -100.0
        assert token_id == int(expected.argmax())
        context += (token_id,)
    assert text(deltas) == bytes(ids(deltas)).decode(errors="replace")
    assert [d.request_done for d in deltas] == [False] * 5 + [True]
    assert deltas[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert deltas[-1].usage == inference_pb2.Usage(prompt_tokens=5, completion_tokens=6)
    assert {d.request_id for d in deltas} == {"r"}


async def test_many_mixed_requests_on_one_exchange_equal_their_solo_output() -> None:
    def mixed(i: int) -> worker_pb2.GenerateRequest:
        prompt = "shared system prompt, " * (i % 3) + f"user {i}: " + "tell me more " * (i % 5)
        more: dict[str, Any] = {"max_tokens": 8 + (i * 7) % 40}
        if i % 2:
            more |= {"temperature": 0.9, "seed": i}
        if i % 5 == 0:
            more |= {"repetition_penalty": 1.5, "frequency_penalty": 0.25}
        if i % 7 == 0:
            more |= {"n": 2, "temperature": 1.0, "seed": 77 + i}
        return ask(f"r{i}", prompt, **more)

    requests = [mixed(i) for i in range(64)]
    cancelled = {f"r{i}" for i in range(0, 64, 3)}
    # Ten of these need about 300 blocks.
    async with running_worker(ToyLoader(num_blocks=301), None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(*requests)
        asked: set[str] = set()
        while not all(router.is_done(r.request_id) for r in requests):
            await router.read()
            midway = {r for r in cancelled - asked if len(ids(router.deltas.get(r, []))) >= 3}
            if midway:
                asked |= midway
                await router.send(cancel=tuple(midway))
        stats = (await worker.stub.Stats(worker_pb2.StatsRequest())).models[0]
        assert stats.num_preemptions > 0
        for request in requests:
            got, expected = router.deltas[request.request_id], await solo(worker, request)
            for index in range(max(1, request.sampling.n)):
                if inference_pb2.FINISH_REASON_CANCELLED in {d.finish_reason for d in got}:
                    assert ids(expected, index)[: len(ids(got, index))] == ids(got, index)
                else:
                    assert ids(got, index) == ids(expected, index)
                    assert text(got, index) == text(expected, index)
        assert await is_idle(worker)
        await router.close()


async def test_every_frame_carries_epoch_and_load_from_the_first_on() -> None:
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        first = await router.read()
        described = await worker.stub.Describe(worker_pb2.DescribeRequest())
        assert first.epoch == described.epoch != ""
        # Long enough for the numbers to be looked at meanwhile, which happens every few milliseconds.
        await router.send(*(ask(f"r{i}", max_tokens=200) for i in range(4)))
        await router.finish("r0", "r1", "r2", "r3")
        assert {frame.epoch for frame in router.frames} == {first.epoch}
        assert max(frame.load.num_running for frame in router.frames) == 4
        assert max(frame.load.kv_usage for frame in router.frames) > 0.0
        # One frame a step, not one a token.
        assert max(len(frame.deltas) for frame in router.frames) >= 4
        await router.close()


async def test_a_broken_stream_cancels_its_requests_and_frees_their_ids() -> None:
    async with running_worker(None, None, "toy") as worker:
        other = Exchange(worker.stub)
        await other.send(ask("mine", max_tokens=200))
        for _ in range(5):
            router = Exchange(worker.stub)
            await router.send(*(ask(f"r{i}", max_tokens=240) for i in range(8)))
            await router.read_until(lambda r=router: len(r.deltas) == 8)  # type: ignore[misc]
            router.break_off()
            again = Exchange(worker.stub)
            await eventually(lambda: len(worker.app.board) <= 1, "the requests of a broken stream go on")
            await again.send(ask("r0", max_tokens=1))
            await again.finish("r0")
            assert again.deltas["r0"][-1].error.code == ""
            await again.close()
        await other.finish("mine")
        assert len(ids(other.deltas["mine"])) == 200
        await other.close()
        await eventually(lambda: is_idle(worker), "blocks did not come back")


async def test_a_client_that_leaves_a_plain_stream_cancels_its_request() -> None:
    async with running_worker(None, None, "toy") as worker:
        call = worker.stub.Generate(ask("r", max_tokens=240))
        await call.read()
        call.cancel()
        await eventually(lambda: is_idle(worker), "the request goes on")


async def test_the_cancel_call_ends_a_request_once() -> None:
    async with running_worker(None, None, "toy") as worker:
        hold(worker, "toy")
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=240))
        await router.read_until(lambda: "r" in router.deltas)
        assert (await worker.stub.Cancel(worker_pb2.CancelRequest(request_ids=["r", "unknown"]))).num_cancelled == 1
        await router.finish("r")
        assert router.deltas["r"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        assert router.deltas["r"][-1].usage.completion_tokens == len(ids(router.deltas["r"]))
        assert (await worker.stub.Cancel(worker_pb2.CancelRequest(request_ids=["r"]))).num_cancelled == 0
        await router.close()


async def test_a_router_cannot_cancel_what_is_not_its_own() -> None:
    async with running_worker(None, None, "toy") as worker:
        hold(worker, "toy")
        mine, other = Exchange(worker.stub), Exchange(worker.stub)
        await mine.send(ask("r", max_tokens=40))
        await mine.read_until(lambda: "r" in mine.deltas)
        await other.send(ask("x", max_tokens=1), cancel=("r",))
        await other.finish("x")
        await mine.finish("r")
        assert len(ids(mine.deltas["r"])) == 40
        await mine.close()
        await other.close()


BAD = {
    "unknown model": (ask("bad", model="nope"), "model_not_found", "model"),
    "no model": (ask("bad", model=""), "invalid_request_error", "model"),
    "no prompt": (worker_pb2.GenerateRequest(request_id="bad", model="toy"), "invalid_request_error", "prompt"),
    "empty prompt": (ask("bad", ""), "invalid_request_error", "prompt"),
    "adapter": (
        worker_pb2.GenerateRequest(request_id="bad", model="toy", text="a", adapter="x"),
        "invalid_request_error",
        "adapter",
    ),
    "negative temperature": (ask("bad", temperature=-1.0), "invalid_request_error", "temperature"),
    "nan": (ask("bad", top_p=float("nan")), "invalid_request_error", "top_p"),
    "bias outside the vocabulary": (ask("bad", logit_bias={99_999_999: 5.0}), "invalid_request_error", "logit_bias"),
    "bias on an id without a token": (ask("bad", logit_bias={258: 5.0}), "invalid_request_error", "logit_bias"),
    "negative bias id": (ask("bad", logit_bias={-1: 5.0}), "invalid_request_error", "logit_bias"),
    "bias too large": (ask("bad", logit_bias={5: 1e9}), "invalid_request_error", "logit_bias"),
    "stop token outside": (ask("bad", stop_token_ids=[10**6]), "invalid_request_error", "stop_token_ids"),
    "too long": (ask("bad", "x" * 257), "context_length_exceeded", "prompt"),
    "exactly full": (ask("bad", "x" * 256), "context_length_exceeded", "prompt"),
    "hugely long": (ask("bad", "x" * 100_000), "context_length_exceeded", "prompt"),
    "prompt and output": (ask("bad", "x" * 200, max_tokens=57), "context_length_exceeded", "max_tokens"),
    "too many choices": (ask("bad", n=1000), "invalid_request_error", "n"),
    "token ids outside": (
        worker_pb2.GenerateRequest(request_id="bad", model="toy", token_ids=worker_pb2.TokenIds(ids=[1, 264])),
        "invalid_request_error",
        "prompt",
    ),
    "no token ids": (
        worker_pb2.GenerateRequest(request_id="bad", model="toy", token_ids=worker_pb2.TokenIds()),
        "invalid_request_error",
        "prompt",
    ),
    "long request id": (ask("x" * 300), "invalid_request_error", "request_id"),
}  # fmt: skip


async def test_bad_requests_end_in_their_own_error_and_touch_nobody() -> None:
    async with running_worker(None, None, "toy") as worker:
        expected = ids(await worker.generate(ask("alone", max_tokens=150)))
        router = Exchange(worker.stub)
        await router.send(ask("good", max_tokens=150))
        for case, (request, code, param) in BAD.items():
            await router.send(request)
            await router.finish(request.request_id)
            (delta,) = router.deltas.pop(request.request_id)
            assert (delta.error.code, delta.error.param) == (code, param), case
            assert delta.error.message, case
            assert not delta.error.retryable, case
        await router.send(ask("next"))
        await router.finish("good", "next")
        assert ids(router.deltas["good"]) == expected
        await router.close()
        assert await is_idle(worker)


async def test_the_whole_context_can_be_used() -> None:
    async with running_worker(None, None, "toy") as worker:
        exact = await worker.generate(ask("exact", "x" * 200, max_tokens=56))
        assert len(ids(exact)) == 56
        rest = await worker.generate(
            worker_pb2.GenerateRequest(
                request_id="rest",
                model="toy",
                text="x" * 200,
                sampling=inference_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
                return_token_ids=True,
            )
        )
        assert ids(rest) == ids(exact)
        only_prompt = await worker.generate(ask("zero", "x" * 256, max_tokens=0))
        assert only_prompt[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert only_prompt[-1].usage.completion_tokens == 0


async def test_a_request_id_is_unique_among_the_living() -> None:
    async with running_worker(None, None, "toy") as worker:
        pause = hold(worker, "toy", step_s=DEADLINE_S)
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=60))
        await eventually(lambda: len(worker.app.board) == 1, "the request did not arrive")
        other = Exchange(worker.stub)
        await other.send(ask("r"))
        await other.finish("r")
        assert other.deltas["r"][0].error.param == "request_id"
        pause.set()
        await router.finish("r")
        assert len(ids(router.deltas["r"])) == 60
        await router.send(ask("r", max_tokens=2))
        before = len(router.deltas.pop("r"))
        await router.finish("r")
        assert before > 0
        assert len(ids(router.deltas["r"])) == 2
        await router.close()
        await other.close()


async def test_long_prompts_are_tokenized_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "INLINE_CHARS", 3)
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(ask("long", "abcdefgh"), ask("gone", "abcdefghi", max_tokens=200), cancel=("gone",))
        await router.finish("long", "gone")
        assert router.deltas["gone"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        assert len(ids(router.deltas["long"])) == 12
        await router.close()


async def test_logprobs_carry_text_and_exact_bytes() -> None:
    async with running_worker(None, None, "toy") as worker:
        deltas = await worker.generate(ask("r", "score", logprobs=2, prompt_logprobs=1, max_tokens=3))
    assert [len(d.logprobs) for d in deltas] == [1, 1, 1]
    for delta in deltas:
        chosen = delta.logprobs[0].chosen
        assert chosen.token_id == delta.token_ids[0]
        assert chosen.bytes == bytes([chosen.token_id])
        assert chosen.rank == 1
        assert [t.rank for t in delta.logprobs[0].top] == [1, 2]
    assert len(deltas[0].prompt_logprobs) == 5
    assert bytes(p.chosen.token_id for p in deltas[0].prompt_logprobs) == b"score"
    assert [p.chosen.rank > 0 for p in deltas[0].prompt_logprobs] == [False, True, True, True, True]


async def test_a_router_that_does_not_read_is_cut_off_and_the_others_are_served() -> None:
    settings = toy_settings(max_unread_deltas=64, max_message_bytes=2**16)
    async with running_worker(ToyLoader(num_blocks=3000), settings, "toy") as worker:
        # Nothing is read: flow control, held to its smallest window, stops the writer; then the bounded queue fills.
        channel = grpc.aio.insecure_channel(worker.app.address, options=[("grpc.http2.bdp_probe", 0)])
        slow = Exchange(worker_pb2_grpc.WorkerStub(channel))
        await slow.send(*(ask(f"s{i}", logprobs=20, max_tokens=240) for i in range(32)))
        good = Exchange(worker.stub)
        await good.send(ask("good", max_tokens=100))
        await good.finish("good")
        assert len(ids(good.deltas["good"])) == 100
        await eventually(lambda: len(worker.app.board) == 0, "requests of a stream nobody reads go on")
        assert await slow.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await good.close()
        await channel.close(None)
        await eventually(lambda: is_idle(worker), "blocks did not come back")


async def test_closing_the_sending_side_lets_requests_finish() -> None:
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(ask("r", max_tokens=30))
        closing = asyncio.create_task(router._call.done_writing())
        await router.finish("r")
        await closing
        assert len(ids(router.deltas["r"])) == 30
        assert await router.code() is grpc.StatusCode.OK


async def test_more_requests_than_allowed_are_refused_as_overload() -> None:
    async with running_worker(None, toy_settings(max_num_requests=4), "toy") as worker:
        router = Exchange(worker.stub)
        names = [f"r{i}" for i in range(6)]
        await router.send(*(ask(name, max_tokens=100) for name in names))
        await router.finish(*names)
        codes = [router.deltas[name][-1].error.code for name in names]
        assert codes == [""] * 4 + ["rate_limit_exceeded"] * 2
        assert router.deltas["r5"][-1].error.retryable
        await router.close()


async def test_answers_that_no_message_could_carry_are_refused_and_large_ones_are_split() -> None:
    limit = 2**16
    async with running_worker(None, toy_settings(max_message_bytes=limit), "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(ask("too much", "x" * 200, prompt_logprobs=20, max_tokens=1))
        await router.finish("too much")
        assert router.deltas["too much"][-1].error.param == "prompt_logprobs"
        # Each fits alone, together they would not.
        names = [f"r{i}" for i in range(16)]
        await router.send(*(ask(name, name + "x" * 60, prompt_logprobs=3, max_tokens=1) for name in names))
        await router.finish(*names)
        for name in names:
            assert len([p for d in router.deltas[name] for p in d.prompt_logprobs]) == len(name) + 60
        assert max(frame.ByteSize() for frame in router.frames) <= limit
        await router.close()
