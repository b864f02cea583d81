"""Structured output by the real model on the native backend: real tokens, real masks, real batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.random_schemas import random_schema, validator_of
from bench.structured_engine import StructuredEngine, chat

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.core.request import FinishReason
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.structured import StructuredKind, StructuredOutput

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[StructuredEngine]:
    """One load for all tests."""
    made = StructuredEngine(smollm2_path)
    yield made
    made.close()


def answers(engine: StructuredEngine, asked: list[tuple[str, SamplingParams]]) -> list[tuple[str, FinishReason | None]]:
    outbox: list[SequenceDelta] = []
    ids = [engine.submit(prompt, params, outbox) for prompt, params in asked]
    while engine.engine.has_work:
        engine.engine.step(outbox)
    engine.scheduler.check()
    found: dict[str, tuple[str, FinishReason | None]] = dict.fromkeys(ids, ("", None))
    for delta in outbox:
        assert delta.error is None, delta.error
        text, reason = found[delta.request_id]
        found[delta.request_id] = text + delta.text, delta.finish_reason or reason
    return [found[request_id] for request_id in ids]


def params(kind: str, *texts: str, **more: Any) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, **more}
    return SamplingParams(structured=StructuredOutput(StructuredKind(kind), texts), **given)


def test_plain_and_structured_answers_equal_those_given_alone(engine: StructuredEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["France", "Spain"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    asked = [
        (chat("Name the capital of France as JSON."), params("json_schema", json.dumps(schema))),
        (chat("Name the capital of France."), SamplingParams(temperature=0.0, max_tokens=12)),
        (chat("Is Paris in France?"), params("choice", "yes", "no")),
        (chat("Say a phone number."), params("regex", r"\+33 [0-9]{3}-[0-9]{4}", temperature=0.9, seed=3)),
        (chat("Name the capital of Spain."), SamplingParams(temperature=0.9, seed=7, max_tokens=20)),
    ]
    together = answers(engine, asked)
    assert json.loads(together[0][0])["country"] == "France"
    assert together[2][0] in ("yes", "no")
    assert together[0][1] == together[2][1] == together[3][1] == FinishReason.STOP
    assert together == [answers(engine, [each])[0] for each in asked]


def test_special_tokens_of_the_real_vocabulary_can_be_asked_for(engine: StructuredEngine) -> None:
    grammar = 'start: "a" <|im_start|> NAME\nNAME: /[a-z]{3}/'
    ((text, reason),) = answers(engine, [("Letters:", params("grammar", grammar))])
    assert (len(text), text[0], reason) == (4, "a", FinishReason.STOP)


def test_random_schemas_validate(engine: StructuredEngine) -> None:
    schemas = [random_schema(seed) for seed in range(1000, 1008)]
    asked = [
        (chat("Write JSON."), params("json_schema", json.dumps(schema), temperature=0.7, top_p=0.9, seed=i))
        for i, schema in enumerate(schemas)
    ]
    for schema, (text, reason) in zip(schemas, answers(engine, asked), strict=True):
        assert reason is FinishReason.STOP, text
        validator_of(schema).validate(json.loads(text))


def test_a_grammar_with_ever_more_readings_ends_soon_and_the_others_go_on(engine: StructuredEngine) -> None:
    # Without a limit each of its tokens takes longer than the one before, up to seconds, and all others wait for it.
    plain = (chat("Name the capital of Spain."), SamplingParams(temperature=0.0, max_tokens=12))
    outbox: list[SequenceDelta] = []
    readings = 'start: e\ne: e e | "a" | "b" | " "'
    slow = engine.submit(chat("Write."), params("grammar", readings, temperature=1.0, seed=1, max_tokens=100), outbox)
    engine.submit(*plain, outbox)
    while engine.engine.has_work:
        engine.engine.step(outbox)
    (error,) = [delta.error for delta in outbox if delta.request_id == slow and delta.is_last]
    assert isinstance(error, InvalidRequest)
    assert "Too many items" in error.message
    text = "".join(delta.text for delta in outbox if delta.request_id != slow)
    assert text == answers(engine, [plain])[0][0]


def test_an_open_object_is_json_without_blanks_to_run_on_with(engine: StructuredEngine) -> None:
    asked = [(chat("Write one short JSON object."), params("json_schema", '{"type":"object"}', max_tokens=400))]
    ((text, _),) = answers(engine, asked)
    assert text.startswith("{")
    assert "\n" not in text
