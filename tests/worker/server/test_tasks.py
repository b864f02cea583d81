"""Requests with a task over gRPC, on a toy decoder: tokens, vectors gathered from parts, and what is wrong."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from toy_model import HIDDEN_SIZE, ToyRunner, toy_logits
from toy_worker import (
    DEADLINE_S,
    Exchange,
    RunningWorker,
    ToyLoader,
    ask,
    eventually,
    ids,
    running_worker,
    toy_settings,
)

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.server import tasks, tokenizing

EMBED, SCORE = worker_pb2.POOLING_KIND_EMBED, worker_pb2.POOLING_KIND_SCORE


def tokenize(request_id: str, text: str | list[int], *, model: str = "toy", **more: Any) -> worker_pb2.GenerateRequest:
    given = {"text": text} if isinstance(text, str) else {"token_ids": worker_pb2.TokenIds(ids=text)}
    task = worker_pb2.TokenizeTask(**given, **more)
    return worker_pb2.GenerateRequest(request_id=request_id, model=model, tokenize=task)


def pool(request_id: str, *texts: str | list[int], pair: str = "", **more: Any) -> worker_pb2.GenerateRequest:
    inputs = []
    for text in texts:
        given = {"text": text} if isinstance(text, str) else {"token_ids": worker_pb2.TokenIds(ids=text)}
        inputs.append(worker_pb2.PoolingInput(**given, pair=pair))
    task = worker_pb2.PoolingTask(**{"inputs": inputs, "kind": EMBED, "normalize": False, **more})
    return worker_pb2.GenerateRequest(request_id=request_id, model="toy", pooling=task)


def state(text: str | list[int]) -> Any:
    """What the toy decoder gives for a text."""
    token_ids = text.encode() if isinstance(text, str) else text
    return toy_logits(tuple(token_ids), "toy://a")[:HIDDEN_SIZE]


def vectors(deltas: list[worker_pb2.Delta]) -> list[Any]:
    """Of a request that went well, in the order of its inputs."""
    last = deltas[-1]
    assert not last.error.code, last.error
    assert last.finish_reason == inference_pb2.FINISH_REASON_STOP
    found = [each for delta in deltas for each in delta.vectors]
    assert [each.index for each in found] == list(range(len(found)))
    return [np.frombuffer(each.values, "<f4") for each in found]


async def error_of(worker: RunningWorker, request: worker_pb2.GenerateRequest) -> worker_pb2.Error:
    (delta,) = await worker.generate(request)
    assert delta.request_done
    return delta.error


async def test_text_becomes_tokens_and_tokens_become_text() -> None:
    async with running_worker(None, None, "toy") as worker:
        (delta,) = await worker.generate(tokenize("a", "né", with_texts=True))
        assert list(delta.tokenized.token_ids) == [110, 195, 169]
        assert list(delta.tokenized.texts) == ["n", "�", "�"]
        assert delta.finish_reason == inference_pb2.FINISH_REASON_STOP
        assert delta.HasField("usage") and delta.usage.prompt_tokens == 0
        (delta,) = await worker.generate(tokenize("b", [110, 195, 169, 256], with_texts=True))
        assert delta.tokenized.text == "né<eos>"
        assert list(delta.tokenized.texts) == ["n", "�", "�", "<eos>"]
        (delta,) = await worker.generate(tokenize("c", ""))
        assert not delta.error.code
        assert list(delta.tokenized.token_ids) == []
        assert worker.engine().stats.num_steps == 0


async def test_long_texts_are_tokenized_aside_and_may_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "INLINE_CHARS", 3)
    gate = threading.Event()

    def slow(*arguments: Any) -> Any:
        assert gate.wait(DEADLINE_S)
        return tokenizing.tokenize(*arguments)

    monkeypatch.setattr(tasks, "tokenize", slow)
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(tokenize("gone", "abcdef"), tokenize("kept", "ghijkl"))
        await router.send(ask("text", "abc"), cancel=("gone",))
        await router.finish("gone", "text")
        assert router.deltas["gone"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        gate.set()
        await router.finish("kept")
        assert len(router.deltas["kept"][-1].tokenized.token_ids) == 6
        await router.close()


async def test_tasks_are_held_while_their_model_loads() -> None:
    loader = ToyLoader(building={"toy://a": threading.Event()})
    async with running_worker(loader) as worker:
        load = worker.stub.Load(worker_pb2.LoadRequest(model="toy", uri="toy://a"))
        await eventually(lambda: worker.app.hub.resident("toy") is not None, "it is known")
        router = Exchange(worker.stub)
        await router.send(tokenize("t", "ab"), pool("p", "cd"))
        await eventually(lambda: worker.app.board.num_held("toy") == 2, "both wait")
        loader.building["toy://a"].set()
        await router.finish("t", "p")
        assert list(router.deltas["t"][-1].tokenized.token_ids) == [97, 98]
        assert vectors(router.deltas["p"])[0].tolist() == state("cd").tolist()
        assert [each async for each in load][-1].state == worker_pb2.MODEL_STATE_READY
        await router.close()


async def test_a_decoders_vectors_come_in_the_order_of_the_inputs() -> None:
    texts: list[str | list[int]] = [
        "once upon a time",
        "b",
        [1, 2, 3],
        "once upon a time there was",
        "once upon a time",
    ]
    async with running_worker(None, None, "toy") as worker:
        deltas = await worker.generate(pool("r", *texts))
        assert [each.tolist() for each in vectors(deltas)] == [state(text).tolist() for text in texts]
        assert [each.prompt_tokens for each in deltas[-1].vectors] == [16, 1, 3, 26, 16]
        assert deltas[-1].usage.prompt_tokens == 62
        assert deltas[-1].revision == "digest of toy://a"
        cut, normal, short = [
            vectors(await worker.generate(pool("r", "abc", **given)))[0]
            for given in ({"dimensions": 3}, {"normalize": True}, {"truncate_tokens": 2})
        ]
        assert cut.tolist() == state("abc")[:3].tolist()
        assert np.linalg.norm(normal) == pytest.approx(1.0, abs=1e-6)
        assert np.allclose(normal * np.linalg.norm(state("abc")), state("abc"), atol=1e-5)
        assert short.tolist() == state("ab").tolist()
        assert len(worker.app.board) == 0


async def test_vectors_that_fill_a_message_come_in_several_deltas() -> None:
    settings = toy_settings(max_message_bytes=2**16)
    async with running_worker(ToyLoader(max_num_seqs=64), settings, "toy") as worker:
        texts = [f"text {index}" for index in range(400)]
        deltas = await worker.generate(pool("r", *texts))
        assert len(deltas) > 1
        assert [delta.request_done for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert max(delta.ByteSize() for delta in deltas) < 2**15
        assert [each.tolist() for each in vectors(deltas)] == [state(text).tolist() for text in texts]


async def test_one_part_that_fails_ends_the_whole_and_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(pool("bad", "ab", [5, 300], "cd"), pool("good", "ef"))
        await router.finish("bad", "good")
        error = router.deltas["bad"][-1].error
        assert (error.code, error.param) == ("invalid_request_error", "inputs[1]")
        runner: ToyRunner = worker.loader.runners["toy"]
        runner.before_step = lambda batch: (_ for _ in ()).throw(RuntimeError("broken"))
        await router.send(pool("worse", "gh", "ij"))
        await router.finish("worse")
        assert router.deltas["worse"][-1].error.code == "internal_error"
        runner.before_step = lambda batch: None
        await router.send(pool("again", "gh", "ij"))
        await router.finish("again")
        assert len(vectors(router.deltas["again"])) == 2
        await router.close()


async def test_cancelled_and_late_parts_all_leave_the_engine() -> None:
    async with running_worker(None, None, "toy") as worker:
        runner: ToyRunner = worker.loader.runners["toy"]
        gate, begun = threading.Event(), threading.Event()

        def hold(batch: Any) -> None:
            begun.set()
            assert gate.wait(DEADLINE_S)

        runner.before_step = hold
        router = Exchange(worker.stub)
        late = pool("late", *(["cd" * 40] * 50))
        late.timeout_s = 0.05
        await router.send(pool("gone", *(["ab" * 40] * 50)), late)
        await eventually(begun.is_set, "a step runs")
        await router.send(cancel=("gone",))
        await eventually(lambda: all(live.is_cancelled for live in worker.app.board), "both are to end")
        gate.set()
        await router.finish("gone", "late")
        assert router.deltas["gone"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        assert router.deltas["late"][-1].error.code == "deadline_exceeded"
        stats = worker.engine().stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        await router.send(ask("after"))
        await router.finish("after")
        assert len(ids(router.deltas["after"])) == 12
        await router.close()


async def test_a_large_task_does_not_stand_before_another_tenants() -> None:
    loader = ToyLoader(max_num_seqs=1)
    async with running_worker(loader, None, "toy") as worker:
        order: list[int] = []
        gate = threading.Event()

        def note(batch: Any) -> None:
            assert gate.wait(DEADLINE_S)
            order.append(int(batch.token_ids[0]))

        loader.runners["toy"].before_step = note
        large = pool("large", *(["a" * 20] * 20))
        large.tenant = "one"
        small = pool("small", "b" * 20)
        small.tenant = "two"
        router = Exchange(worker.stub)
        await router.send(large, small)
        # The engine may stand in the first step by now: what comes later is taken after it.
        posted = worker.app.hub.models_by_name()["toy"]
        await eventually(lambda: posted.num_posted == 21, "all are there")
        gate.set()
        await router.finish("large", "small")
        assert ord("b") in order[:4], "its turn comes after about one input of the other"
        await router.close()


WRONG = [
    (pool("r"), "inputs", "0 inputs"),
    (pool("r", *(["a"] * 2049)), "inputs", "2049 inputs"),
    (pool("r", "a", kind=worker_pb2.POOLING_KIND_UNSPECIFIED), "kind", "kind is 0"),
    (pool("r", "a", kind=SCORE), "model", "asked to score pairs"),
    (pool("r", "a", pair="b"), "inputs[0]", "is a pair"),
    (pool("r", "a", inputs=[worker_pb2.PoolingInput()]), "inputs[0]", "input 0 is empty"),
    (pool("r", "a", dimensions=-1), "dimensions", "dimensions is -1"),
    (pool("r", "a", dimensions=9), "dimensions", "vectors have 8"),
    (pool("r", "a", truncate_tokens=-2), "truncate_tokens", "truncate_tokens is -2"),
    (pool("r", "a", ""), "inputs[1]", "input 1: it has no tokens"),
    (pool("r", [1], [-1]), "inputs[1]", "token id -1"),
    (tokenize("r", [999]), "token_ids", "999"),
    (tokenize("r", "x" * (2**22 + 1)), "text", "4194305 characters"),
    (worker_pb2.GenerateRequest(request_id="r", model="toy", tokenize=worker_pb2.TokenizeTask()), "text", "nothing"),
    (worker_pb2.GenerateRequest(request_id="r", model="toy"), "prompt", "no prompt"),
    (
        worker_pb2.GenerateRequest(request_id="r", model="toy", tensors=worker_pb2.TensorTask(inputs=[{"name": "x"}])),
        "model",
        "asked to take tensors",
    ),
]


async def test_tasks_that_cannot_be_are_refused_by_field() -> None:
    async with running_worker(None, None, "toy") as worker:
        for request, param, message in WRONG:
            error = await error_of(worker, request)
            assert (error.code, error.param) == ("invalid_request_error", param), error
            assert message in error.message
        for text in ("z" * 257, "z" * 5000, [1] * 257):
            error = await error_of(worker, pool("r", "a", text))
            assert (error.code, error.param) == ("context_length_exceeded", "inputs[1]")
            assert "256" in error.message
        assert worker.engine().stats.num_steps == 0


async def test_an_answer_of_tokens_that_no_message_holds_is_refused() -> None:
    async with running_worker(None, toy_settings(max_message_bytes=2**16), "toy") as worker:
        error = await error_of(worker, tokenize("r", "x" * 20_000))
        assert (error.code, error.param) == ("invalid_request_error", "text")
