"""Structured output over real gRPC: from the message to text that matches, and bad wishes that cost nobody else."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from toy_worker import Exchange, ToyLoader, ask, eventually, ids, running_worker, text

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.adapters.engine import grammar_compiler
from naru_worker.adapters.engine.grammar_matcher import GrammarMatcher
from naru_worker.adapters.engine.grammar_source import compile_matcher

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
)


def wanted(request_id: str, prompt: str = "once upon", *, param: str = "", **given: Any) -> worker_pb2.GenerateRequest:
    kinds = ("json_schema", "json_object", "regex", "choice", "grammar")
    structured = inference_pb2.StructuredOutput(param=param, **{k: given.pop(k) for k in kinds if k in given})
    return ask(request_id, prompt, **{"max_tokens": 60, "ignore_eos": False, "structured": structured, **given})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take seconds over what takes milliseconds."""
    monkeypatch.setattr(grammar_compiler, "COMPILE_LIMIT_S", 60.0)


async def test_each_kind_is_kept_and_streamed() -> None:
    choices = inference_pb2.Choices(texts=["red", "green"])
    cases = {
        "schema": (wanted("schema", json_schema=SCHEMA), r'\{"name":".{0,8}","ok":(true|false)\}'),
        "object": (wanted("object", json_object=True, max_tokens=20), r"\{.*"),
        "regex": (wanted("regex", regex="[0-9]{4}"), r"[0-9]{4}"),
        "choice": (wanted("choice", choice=choices), "red|green"),
        "grammar": (wanted("grammar", grammar='start: "a" /[bc]{3}/'), "a[bc]{3}"),
        "free": (wanted("free", json_object=False, max_tokens=4), ".{4}"),
    }
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(*(request for request, _ in cases.values()))
        await router.finish(*cases)
        for name, (_, pattern) in cases.items():
            assert re.fullmatch(pattern, text(router.deltas[name]), re.DOTALL), text(router.deltas[name])
        assert router.deltas["regex"][-1].finish_reason == inference_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json_schema": '{"type":"yaml"}'}, "yaml"),
        ({"json_schema": '{"type":"string","pattern":"(["}'}, "regex parse error"),
        ({"json_schema": "{"}, "cannot be used"),
        ({"regex": "(["}, "regex parse error"),
        ({"choice": inference_pb2.Choices()}, "0 choices"),
        ({"grammar": "start: ("}, "Expected token"),
        ({"regex": "a" * 70_000}, "at most"),
        ({}, "no kind"),
        ({"regex": "a", "beam_width": 2}, "beam"),
    ],
)
async def test_a_bad_wish_is_refused_by_its_param_while_others_go_on(given: dict[str, Any], said: str) -> None:
    async with running_worker(None, None, "toy") as worker:
        expected = ids(await worker.generate(ask("solo")))
        router = Exchange(worker.stub)
        await router.send(ask("plain"), wanted("bad", param="guided", **given), wanted("good", regex="[xy]{5}"))
        await router.finish("plain", "bad", "good")
        (bad,) = router.deltas["bad"]
        assert (bad.error.code, bad.error.param) == ("invalid_request_error", "guided")
        assert said in bad.error.message
        assert ids(router.deltas["plain"]) == expected
        assert re.fullmatch("[xy]{5}", text(router.deltas["good"]))
        await eventually(lambda: not len(worker.app.board), "a request is left")


async def test_a_request_goes_on_where_another_worker_left_it() -> None:
    async with running_worker(None, None, "toy") as worker:
        whole = await worker.generate(wanted("a", json_schema=SCHEMA, temperature=0.9, seed=5))
        for cut in (3, 12):
            request = wanted("b", json_schema=SCHEMA, temperature=0.9, seed=5)
            request.prior.add(token_ids=ids(whole)[:cut])
            assert ids(await worker.generate(request)) == ids(whole)[cut:]
        wrong = wanted("c", json_schema=SCHEMA)
        wrong.prior.add(token_ids=b"nothing of it")
        (delta,) = await worker.generate(wrong)
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", "prior")
        odd = wanted("d", json_schema=SCHEMA)
        odd.prior.add(token_ids=[-5])
        odd.prior.add(token_ids=[1])
        (delta,) = await worker.generate(odd)
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", "prior")


async def test_prior_output_of_more_choices_than_there_are_is_refused_before_anything_is_made_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def counted(*given: Any) -> GrammarMatcher:
        made.append(given)
        return GrammarMatcher(*given)

    monkeypatch.setattr(grammar_compiler, "GrammarMatcher", counted)
    async with running_worker(None, None, "toy") as worker:
        request = wanted("a", regex="[xy]{5}")
        for _ in range(500):
            request.prior.add()
        (delta,) = await worker.generate(request)
        assert (delta.error.code, delta.error.param) == ("invalid_request_error", "prior")
        assert "500 items for 1 choices" in delta.error.message
        assert not made
        assert re.fullmatch("[xy]{5}", text(await worker.generate(wanted("b", regex="[xy]{5}"))))
        assert len(made) == 1


async def test_a_held_request_is_compiled_when_its_model_is_there() -> None:
    loader = ToyLoader()
    gate = loader.building["toy://a"] = threading.Event()
    async with running_worker(loader) as worker:
        loading = asyncio.create_task(worker.load())
        router = Exchange(worker.stub)
        await eventually(lambda: _is_known(worker), "the model is not known")
        await router.send(wanted("a", regex="[xy]{5}", max_tokens=50))
        await eventually(lambda: worker.app.board.num_held("toy") == 1, "it is not held")
        gate.set()
        await router.finish("a")
        assert re.fullmatch("[xy]{5}", text(router.deltas["a"]))
        await loading


async def _is_known(worker: Any) -> bool:
    reply = await worker.stub.Describe(worker_pb2.DescribeRequest())
    return any(model.model == "toy" for model in reply.models)


async def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()

    def slow(vocabulary: Any, wish: Any) -> Any:
        begun.set()
        gate.wait(20)
        return compile_matcher(vocabulary, wish)

    monkeypatch.setattr(grammar_compiler, "compile_matcher", slow)
    monkeypatch.setattr(grammar_compiler, "COMPILE_LIMIT_S", 20.0)
    async with running_worker(None, None, "toy") as worker:
        router = Exchange(worker.stub)
        await router.send(wanted("a", regex="[xy]{5}"), ask("plain"))
        await asyncio.to_thread(begun.wait, 20)
        await router.finish("plain")
        await router.send(cancel=("a",))
        await router.finish("a")
        assert router.deltas["a"][-1].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        gate.set()
        await router.send(wanted("b", regex="[xy]{5}"))
        await router.finish("b")
        assert re.fullmatch("[xy]{5}", text(router.deltas["b"]))


async def test_special_tokens_are_shown_on_request() -> None:
    async with running_worker(None, None, "toy") as worker:
        request = wanted("a", grammar='start: "a" <sep> "b"')
        assert text(await worker.generate(request)) == "ab"
        request.show_special_tokens = True
        assert text(await worker.generate(request)) == "a<sep>b"
