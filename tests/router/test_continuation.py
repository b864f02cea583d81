"""A worker is lost in the middle of an answer: another one goes on, and the client cannot tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import httpx
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, events
from stub_worker import STOP, Script, StubWorker, hang, usage

from naru_proto import names
from naru_proto.v1 import inference_pb2, inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.transcript import Transcript

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
STREAM = pytest.mark.parametrize("stream", [False, True])
WORDS = ("one ", "two ", "three ", "four ", "five")
WHOLE = "".join(WORDS)


def tell(*, pause_after: int | None = None, revision: str = "r1") -> Script:
    """Says the words from where the prior output ends, a token each; silent for ever once so many were said."""

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        n = request.sampling.n or 1
        prior = [len(each.token_ids) for each in request.prior] or [0] * n
        open_ = [i for i in range(n) if not (request.prior and request.prior[i].is_finished)]
        is_first = True
        for place, word in enumerate(WORDS):
            if place == pause_after:
                await asyncio.Event().wait()
            for index in open_:
                if place < prior[index]:
                    continue
                delta = wire.Delta(index=index, text=word, num_tokens=1, token_ids=[100 + place])
                if is_first:
                    delta.revision, delta.cached_tokens, is_first = revision, 3 if not request.prior else 9, False
                if place == len(WORDS) - 1:
                    delta.finish_reason = STOP
                    if index == open_[-1]:
                        delta.usage.CopyFrom(usage(completion=len(WORDS) * n, cached=9 if request.prior else 3))
                        delta.request_done = True
                yield delta

    return script


async def workers(rig: Rig, *scripts: Script, **settings: Any) -> list[StubWorker]:
    """One worker a script; the one that the smallest completion goes to has the first one."""
    await rig.publish_model()
    started = [await rig.start_worker(f"w{i}", tell()) for i in range(len(scripts))]
    await rig.start_router(**settings)
    home = (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].split(";")[0]
    started.sort(key=lambda worker: worker.worker_id != home)
    for worker, script in zip(started, scripts, strict=True):
        worker.script = script
        worker.requests.clear()
    return started


NUM_WARM_UP = len(WORDS)
"""Deltas of the request that finds the first worker."""


def said(path: str, response: httpx.Response, stream: bool) -> str:
    """The text of an answer that must be whole and well formed."""
    if not stream:
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return str(choice["message"]["content"] if path == CHAT else choice["text"])
    *chunks, end = events(response.content)
    assert end == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    if path == CHAT:
        assert [c["delta"].get("role") for c in choices].count("assistant") == 1
    return "".join((c["delta"].get("content") or "") if path == CHAT else c["text"] for c in choices)


class Told:
    """Counts the deltas that the router has taken from workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_deltas = 0
        add = Transcript.add

        def count(transcript: Transcript, deltas: Sequence[wire.Delta]) -> None:
            add(transcript, deltas)
            self.num_deltas += len(deltas)

        monkeypatch.setattr(Transcript, "add", count)

    async def lose(self, worker: StubWorker, rig: Rig, num_deltas: int) -> None:
        """Kills a worker once the router has all that it will ever say."""
        await rig.until(lambda: self.num_deltas >= num_deltas)
        assert worker.running
        await worker.kill()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@STREAM
@BOTH
async def test_an_answer_goes_on_where_its_worker_was_lost(rig: Rig, told: Told, path: str, stream: bool) -> None:
    started = await workers(rig, tell(pause_after=3), tell(pause_after=3))
    told.num_deltas = 0
    request = asyncio.create_task(rig.post(path, body(path, stream=stream)))
    await rig.until(lambda: told.num_deltas == 3)
    (lost,), (other,) = ([w for w in started if bool(w.running) is runs] for runs in (True, False))
    other.script = tell()
    await lost.kill()
    response = await request
    assert response.status_code == 200 and said(path, response, stream) == WHOLE
    before, after = lost.requests[0], other.requests[0]
    assert [list(each.token_ids) for each in after.prior] == [[100, 101, 102]]
    assert after.prior_revision == "r1"
    # Nobody had asked for a seed: without one the rest would be drawn from another stream.
    assert before.sampling.HasField("seed") and after.sampling == before.sampling
    assert (after.text, after.model, after.return_token_ids) == (before.text, before.model, True)
    text = (await rig.client.get("/metrics")).text
    assert "naru_router_continued_requests_total 1.0" in text


async def test_usage_is_that_of_the_whole_answer(rig: Rig, told: Told) -> None:
    first, _ = await workers(rig, tell(pause_after=2), tell())
    options = {"stream_options": {"include_usage": True}}
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION, **options)))
    await told.lose(first, rig, NUM_WARM_UP + 2)
    final = (await request)[-2]["usage"]
    assert final["completion_tokens"] == len(WORDS)
    assert final["prompt_tokens_details"]["cached_tokens"] == 3


async def test_each_choice_goes_on_by_itself_and_a_finished_one_does_not(rig: Rig, told: Told) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for place, word in enumerate(WORDS):
            finish = STOP if place == len(WORDS) - 1 else None
            yield wire.Delta(index=1, text=word, num_tokens=1, token_ids=[100 + place], finish_reason=finish)
        yield wire.Delta(index=0, text=WORDS[0], num_tokens=1, token_ids=[100])
        await asyncio.Event().wait()

    first, second = await workers(rig, script, tell())
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION, n=2)))
    await told.lose(first, rig, NUM_WARM_UP + 6)
    *chunks, end = await request
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in (0, 1)]
    assert texts == [WHOLE, WHOLE] and end == "[DONE]"
    prior = second.requests[0].prior
    assert [(len(each.token_ids), each.is_finished) for each in prior] == [(1, False), (5, True)]


async def test_a_grpc_client_cannot_tell_either(rig: Rig, told: Told) -> None:
    first, _ = await workers(rig, tell(pause_after=3), tell())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.InferenceGenerateRequest(model=MODEL, prompt="hi"))

        async def read() -> str:
            return "".join([reply.text async for reply in call])

        reading = asyncio.create_task(read())
        await told.lose(first, rig, NUM_WARM_UP + 3)
        assert await reading == WHOLE


async def test_an_answer_that_a_drain_cuts_short_goes_on_elsewhere(rig: Rig) -> None:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        yield wire.Delta(text=WORDS[0], num_tokens=1, token_ids=[100])
        error = wire.Error(code="service_unavailable", message="shutting down", retryable=True)
        yield wire.Delta(error=error, request_done=True)

    _, second = await workers(rig, script, tell())
    response = await rig.post(COMPLETION, body(COMPLETION, stream=True))
    assert said(COMPLETION, response, True) == WHOLE
    # Whether the first token arrived in a frame of its own is the network's affair.
    assert len(second.requests) == 1


async def test_an_answer_that_kills_workers_kills_two_and_ends_with_an_error_event(rig: Rig, told: Told) -> None:
    started = await workers(rig, tell(pause_after=2), tell(pause_after=4), tell(pause_after=4))
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await told.lose(started[0], rig, NUM_WARM_UP + 2)
    await rig.until(lambda: told.num_deltas >= NUM_WARM_UP + 4)
    (second,) = [worker for worker in started[1:] if worker.running]
    await second.kill()
    *chunks, error = await request
    assert error["error"]["code"] == "service_unavailable"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "".join(WORDS[:4])
    assert sum(len(worker.requests) for worker in started) == 2


async def test_without_another_worker_it_waits_for_the_lost_one_to_come_back(rig: Rig, told: Told) -> None:
    (worker,) = await workers(rig, tell(pause_after=3), model_wait_s=30.0)
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await told.lose(worker, rig, NUM_WARM_UP + 3)
    await rig.board.delete(names.key_worker("w0"))
    worker.script = tell()
    await worker.start()
    await rig.publish_worker("w0", epoch="e2", models=())
    *chunks, end = await request
    assert "".join(c["choices"][0]["text"] for c in chunks) == WHOLE and end == "[DONE]"
    assert len(worker.requests) == 2 and len(worker.requests[1].prior[0].token_ids) == 3


async def test_without_another_worker_the_wait_ends_with_an_error_event(rig: Rig, told: Told) -> None:
    (worker,) = await workers(rig, tell(pause_after=3), model_wait_s=0.3)
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await told.lose(worker, rig, NUM_WARM_UP + 3)
    error = (await request)[-1]["error"]
    assert error["code"] == "service_unavailable" and "before the answer was complete" in error["message"]


async def test_an_answer_whose_tokens_are_not_known_ends_with_an_error_event(rig: Rig, told: Told) -> None:
    first, second = await workers(rig, hang("a"), tell())
    request = asyncio.create_task(rig.stream(COMPLETION, body(COMPLETION)))
    await told.lose(first, rig, NUM_WARM_UP + 1)
    chunk, error = await request
    assert chunk["choices"][0]["text"] == "a" and error["error"]["code"] == "service_unavailable"
    assert second.requests == []


def delta(**fields: Any) -> wire.Delta:
    return wire.Delta(**fields)


def test_prompt_logprobs_that_were_told_are_not_asked_for_again() -> None:
    transcript = Transcript(1)
    request = wire.GenerateRequest(sampling=inference_pb2.SamplingParams(prompt_logprobs=1, seed=5))
    told = delta(text="a", num_tokens=1, token_ids=[7], prompt_logprobs=[inference_pb2.PositionLogprobs()])
    transcript.add([told])
    rest = transcript.request_from_here(request)
    assert not rest.sampling.HasField("prompt_logprobs") and rest.sampling.seed == 5
    assert request.sampling.HasField("prompt_logprobs") and not request.prior


@pytest.mark.parametrize(
    ("deltas", "can_go_on"),
    [
        ([], False),
        ([delta(text="a", num_tokens=1, token_ids=[1])], True),
        ([delta(num_tokens=1, token_ids=[1])], True),
        ([delta(text="a", num_tokens=1, token_ids=[1]), delta(text="b", num_tokens=1)], False),
        ([delta(text="a", num_tokens=2, token_ids=[1])], False),
        ([delta(text="a", num_tokens=1, token_ids=[1]), delta(text="b")], False),
        ([delta(text="a", num_tokens=1, token_ids=[1]), delta(text="\ufffd", finish_reason=STOP)], True),
    ],
)
def test_an_answer_can_go_on_when_every_token_of_it_is_known(deltas: list[wire.Delta], can_go_on: bool) -> None:
    transcript = Transcript(1)
    transcript.add(deltas)
    assert transcript.can_go_on is can_go_on
