"""Grammars of one model: compiled once, kept within bounds, and refused in time with a reason."""

from __future__ import annotations

import asyncio
import datetime
import json
import threading
from typing import Any

import pytest
from toy_grammars import toy_vocabulary, wish_of
from toy_model import EOS, NUM_TOKENS, ToyTokenizer

from naru_proto.errors import InternalError, InvalidRequest, Overloaded
from naru_worker.adapters.engine import grammar_compiler, grammar_threads
from naru_worker.adapters.engine.grammar_compiler import GrammarCompiler, GrammarRoom
from naru_worker.adapters.engine.grammar_source import compile_matcher
from naru_worker.adapters.engine.grammar_vocabulary import GrammarVocabulary
from naru_worker.core.structured import StructuredKind, StructuredOutput
from naru_worker.core.token_matcher import MatchState


def compiler(room: GrammarRoom | None = None, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(room or GrammarRoom(), ToyTokenizer(), NUM_TOKENS, (EOS,), **options)


def nested(depth: int, leaf: Any) -> Any:
    schema = leaf
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def chain(length: int, form: str) -> str:
    """References that lead to one another, as text of a schema."""
    links = ",".join(f'"d{i}":' + form.replace("NEXT", f'{{"$ref":"#/$defs/d{i + 1}"}}') for i in range(length))
    return f'{{"$defs":{{{links},"d{length}":{{"type":"null"}}}},"$ref":"#/$defs/d0"}}'


MUTUAL = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
OPTIONS = [{"type": "object", "properties": {f"k{i}": {"type": "integer"}}} for i in range(6)]
DOUBLES = "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'
REFUSED = {
    "schema of an unknown type": ("json_schema", {"type": "yaml"}),
    "pattern that is none": ("json_schema", {"type": "string", "pattern": "(["}),
    "nothing but itself": ("json_schema", {"$ref": "#"}),
    "nothing but one another": ("json_schema", MUTUAL),
    "reference to nowhere": ("json_schema", {"$ref": "#/$defs/x"}),
    "reference to a file": ("json_schema", {"$ref": "file:///etc/passwd"}),
    "reference to a page": ("json_schema", {"$ref": "https://example.com/schema.json"}),
    "depth of 200": ("json_schema", nested(200, {"type": "string"})),
    "nesting of 10 000": ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000),
    "array": ("json_schema", [1]),
    "text": ("json_schema", '"a"'),
    "false": ("json_schema", "false"),
    "no JSON": ("json_schema", "{"),
    "blank": ("json_schema", "  "),
    "a number of 5000 digits": ("json_schema", '{"minimum":' + "9" * 5000 + "}"),
    "keywords that are not enforced": ("json_schema", {"type": "array", "uniqueItems": True}),
    "not": ("json_schema", {"not": {"type": "string"}}),
    "branches that overlap": ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    "options of the library": ("json_schema", {"type": "object", "x-guidance": {"lenient": True}}),
    "options of the library in another spelling": ("json_schema", '{"type":"object","x\\u002dguidance":{}}'),
    "contradiction": ("json_schema", {"type": "integer", "minimum": 5, "maximum": 3}),
    "choice of none": ("json_schema", {"enum": []}),
    "product of choices": ("json_schema", {"allOf": [{"anyOf": OPTIONS}] * 12}),
    "pattern that explodes": ("json_schema", {"properties": {"b": {"pattern": "^((a{100}){100}){100}$"}}}),
    "name pattern that explodes": ("json_schema", {"patternProperties": {"^(a{1000}){1000}$": {}}}),
    "regex that is none": ("regex", "(["),
    "regex that explodes": ("regex", "(a{1000}){1000}"),
    "regex with a look-ahead": ("regex", "(?=a)b"),
    "regex with a back reference": ("regex", r"(a)\1"),
    "regex that nothing matches": ("regex", r"[^\s\S]"),
    "regex of 10 000 groups": ("regex", "(" * 10_000 + "a" + ")" * 10_000),
    "grammar that is none": ("grammar", "start: ("),
    "grammar without a start": ("grammar", 'foo: "a"'),
    "grammar that is itself": ("grammar", "start: start"),
    "grammar of 10 000 brackets": ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "grammar with a special token that the model lacks": ("grammar", 'start: <|nope|> "a"'),
    "grammar that doubles 40 times": ("grammar", DOUBLES),
    "grammar in circles": ("grammar", "start: A\nA: B\nB: A"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
async def test_what_cannot_be_kept_is_refused_with_the_param_and_a_reason(case: str) -> None:
    kind, given = REFUSED[case]
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(InvalidRequest) as caught:
        wish = StructuredOutput(StructuredKind(kind), (text,), "response_format.json_schema")
        await compiler().matchers(wish, 1)
    assert caught.value.param == "response_format.json_schema"
    assert kind in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (
            "json_schema",
            '{"type":"object","properties":{"wheels":"four"}}',
            'properties.wheels should be a schema (an object), and is "four"',
        ),
        (
            "json_schema",
            '{"items":[],"allOf":[true,{"not":{"type":["string","text"]}}]}',
            "allOf[1].not.type should be",
        ),
        ("json_schema", '{"properties":[1]}', "properties should be an object of schemas, and is [1]"),
        (
            "json_schema",
            '{"anyOf":{"const":"' + "x" * 90 + '"}}',
            'anyOf should be a list of schemas, and is {"const":',
        ),
        ("json_schema", "3", "the whole should be a schema (an object), and is 3"),
        ("json_schema", "four", "it is no JSON: Expecting value"),
        ("json_schema", '{"minimum":NaN}', "it is no JSON: NaN"),
        ("json_schema", '{"x\\u002dguidance":{"lenient":true}}', "x-guidance is no keyword"),
        ("grammar", "start: %json " + json.dumps({"items": {"pattern": "(a{1000}){1000}"}}), "a pattern has"),
        ("grammar", "start: /((a{100}){100}){100}/", "a pattern has"),
    ],
)
async def test_a_refusal_says_what_is_wrong_and_where(kind: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await compiler().matchers(wish_of(kind, text), 1)
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x-guidance": {"const": "x-guidance"}, "properties": {"type": "string"}}},
        {"items": [{"const": {"properties": 1, "type": 5}}], "enum": [{"anyOf": 1}, [1]]},
        {"$defs": {"type": {"type": "string"}, "never": False}, "items": True, "additionalProperties": False},
    ],
)
async def test_names_and_values_are_no_keywords(schema: Any) -> None:
    (matcher,) = await compiler().matchers(wish_of("json_schema", json.dumps(schema)), 1)
    assert not matcher.failure


def tools_grammar(num_tools: int, num_arguments: int) -> str:
    """Calls of functions as a router writes them, with the library's options in each schema."""
    options = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    lines = ["start: " + " | ".join(f"call_{i}" for i in range(num_tools))]
    for i in range(num_tools):
        properties = {
            f"argument_{i}_{k}": {"type": "string", "enum": [f"value_{i}_{k}_{v}" for v in range(8)]}
            for k in range(num_arguments)
        }
        properties["code"] = {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}
        schema = {"type": "object", "properties": properties, "required": [*properties], "x-guidance": options}
        lines.append(f'call_{i}: "tool_{i} " %json {json.dumps(schema)}')
    return "\n".join(lines) + "\n"


async def test_forty_tools_of_an_agent_are_compiled() -> None:
    lark = tools_grammar(40, 14)
    assert 100_000 < len(lark) < 200_000
    (matcher,) = await compiler(limit_s=20.0).matchers(wish_of("grammar", lark), 1)
    text = b'tool_39 {"argument_39_0": "value_39_0_'
    assert all(matcher.advance(token_id) is MatchState.OPEN for token_id in text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", chain(4000, "NEXT")),
        ("json_schema", chain(2500, '{"type":"object","properties":{"a":NEXT},"required":["a"]}')),
        ("json_schema", chain(4000, '{"allOf":[NEXT]}')),
        ("grammar", "start: t0\n" + "\n".join(f"t{i}: t{i + 1}" for i in range(4400)) + '\nt4400: "a"'),
        ("grammar", "start: T0\n" + "\n".join(f'T{i}: T{i + 1} "b"' for i in range(3000)) + '\nT3000: "a"'),
        ("regex", "(ab?)" * 10_000),
    ],
)
async def test_long_chains_are_followed_or_refused_and_crash_nothing(kind: str, text: str) -> None:
    try:
        (matcher,) = await compiler(limit_s=20.0).matchers(wish_of(kind, text), 1)
    except InvalidRequest as refused:
        assert "cannot be used" in refused.message
    else:
        assert not matcher.failure


@pytest.mark.parametrize(
    "wish",
    [
        lambda: wish_of("regex", "a" * 70_000),
        lambda: wish_of("json_schema", " " * 300_000),
        lambda: wish_of("grammar", "x" * 300_000),
        lambda: wish_of("choice", *map(str, range(2001))),
        lambda: wish_of("choice", *("x" * 500 for _ in range(200))),
        lambda: wish_of("choice"),
        lambda: wish_of("regex", " "),
    ],
)
def test_sizes_are_checked_before_anything_is_compiled(wish: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wish()
    assert caught.value.param == "response_format"


async def test_equal_grammars_are_compiled_once_even_at_the_same_time_and_refusals_are_kept() -> None:
    grammars = compiler()
    wish, bad = wish_of("regex", "[a-z]+"), wish_of("regex", "([")
    made = await asyncio.gather(*(grammars.matchers(wish, 2) for _ in range(20)))
    assert grammars.num_compiled == 1
    assert len({id(matcher.native) for matchers in made for matcher in matchers}) == 40, "each has its own state"
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await grammars.matchers(bad, 1)
    assert grammars.num_compiled == 2


async def test_the_least_used_grammar_leaves() -> None:
    grammars = compiler(max_kept=2)
    a, b, c = (wish_of("choice", text) for text in "abc")
    for wish in (a, b, a, c):
        await grammars.matchers(wish, 1)
    assert grammars.num_compiled == 3
    await grammars.matchers(a, 1)
    assert grammars.num_compiled == 3
    await grammars.matchers(b, 1)
    assert grammars.num_compiled == 4


async def test_models_with_one_tokenizer_share_a_vocabulary_while_one_of_them_lives() -> None:
    room, tokenizer = GrammarRoom(), ToyTokenizer()
    first, second = (GrammarCompiler(room, tokenizer, NUM_TOKENS, (EOS,)) for _ in range(2))
    for each in (first, second):
        await each.matchers(wish_of("choice", "a"), 1)
    assert len(room.vocabularies) == 1
    del first, second, each


async def test_a_compilation_that_takes_too_long_is_refused_and_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def slow(vocabulary: GrammarVocabulary, wish: StructuredOutput) -> Any:
        if wish.texts == ("slow",):
            gate.wait()
        return compile_matcher(vocabulary, wish)

    monkeypatch.setattr(grammar_compiler, "compile_matcher", slow)
    grammars = compiler(limit_s=0.05)
    try:
        with pytest.raises(InvalidRequest, match=r"more than 0\.05 s"):
            await grammars.matchers(wish_of("regex", "slow"), 1)
        assert await grammars.matchers(wish_of("choice", "quick"), 1)
    finally:
        gate.set()
    # The machine may have been busy: the next one who asks may have more luck.
    grammars._limit_s = 20.0
    assert await grammars.matchers(wish_of("regex", "slow"), 1)


async def test_while_all_threads_are_stuck_others_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(grammar_threads, "TURN_WAIT_S", 0.05)
    threads = grammar_threads.GrammarThreads(max_threads=1)
    with pytest.raises(TimeoutError):
        await threads.run(lambda: gate.wait(20), 0.01)
    with pytest.raises(Overloaded):
        await threads.run(lambda: 1, 1.0)
    gate.set()
    monkeypatch.setattr(grammar_threads, "TURN_WAIT_S", 20.0)
    assert await threads.run(lambda: 2, 20.0) == 2


async def test_a_panic_in_a_thread_is_an_error_of_ours() -> None:
    class Panic(BaseException):
        """What the library's binding raises is no Exception."""

    def panic() -> None:
        raise Panic

    with pytest.raises(InternalError, match="Panic"):
        await grammar_threads.GrammarThreads().run(panic, 20.0)


async def test_who_leaves_does_not_take_the_compilation_from_others() -> None:
    grammars = compiler()
    wish = wish_of("regex", "[a-z]+x")
    first = asyncio.create_task(grammars.matchers(wish, 1))
    second = asyncio.create_task(grammars.matchers(wish, 1))
    await asyncio.sleep(0)
    first.cancel()
    assert len(await second) == 1
    assert grammars.num_compiled == 1


def test_json_has_no_blanks_between_its_parts() -> None:
    matcher = compile_matcher(toy_vocabulary(), wish_of("json_schema", '{"type":"object"}'))
    for text in ("{ ", "{\n", ' {"a":1}', '{"a" ', '{"a": ', '{"a":1 '):
        assert matcher.deep_copy().try_consume_tokens(list(text.encode())) < len(text)
    whole = matcher.deep_copy()
    assert whole.try_consume_tokens(list(b'{"a b":[1,null,{"c":" "}]}')) == 26
    assert whole.is_stopped()


@pytest.mark.parametrize(
    ("schema", "after"),
    [
        ({"type": "string", "format": "date"}, ""),
        ({"type": "string", "format": "date-time"}, "T12:00:00Z"),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"type": "string", "format": "date", "pattern": "[0-9]$"}}}, ""),
        ({"anyOf": [{"type": "string", "format": "date", "allOf": [{"maxLength": 10}]}, {"type": "null"}]}, ""),
    ],
)
def test_dates_are_those_of_the_calendar(schema: Any, after: str) -> None:
    matcher = compile_matcher(toy_vocabulary(), wish_of("json_schema", json.dumps(schema)))

    def takes(date: str) -> bool:
        text, copy = json.dumps(date + after).encode(), matcher.deep_copy()
        return bool(copy.try_consume_tokens(list(text)) == len(text) and copy.is_accepting())

    days = [datetime.date(1999, 1, 1) + datetime.timedelta(7 * week) for week in range(110)]
    leaps = ["1996-02-29", "2000-02-29", "2024-02-29", "2400-02-29", "0004-02-29"]
    assert all(map(takes, [day.isoformat() for day in days] + leaps + ["0001-01-01", "9999-12-31", "1000-03-01"]))
    wrong = [
        "1900-02-29",
        "2023-02-29",
        "2100-02-29",
        "0000-01-01",
        "0000-02-29",
        "2023-02-30",
        "2023-04-31",
        "2023-13-01",
    ]
    assert not any(map(takes, wrong))


def test_a_date_that_is_a_value_or_a_name_stays_as_it_is() -> None:
    schema = {"properties": {"format": {"const": {"format": "date"}}}, "required": ["format"]}
    matcher = compile_matcher(toy_vocabulary(), wish_of("json_schema", json.dumps(schema)))
    text = b'{"format":{"format":"date"}'
    assert matcher.try_consume_tokens(list(text)) == len(text)


def test_a_model_without_an_end_still_ends_where_nothing_may_follow() -> None:
    vocabulary = GrammarVocabulary(ToyTokenizer(), 256, ())
    matcher = compile_matcher(vocabulary, wish_of("choice", "ab"))
    assert matcher.try_consume_tokens(list(b"ab")) == 2
    assert matcher.is_stopped()


def test_what_ends_a_sequence_is_never_text() -> None:
    # Here the end is an ordinary token in the tokenizer's eyes.
    vocabulary = GrammarVocabulary(ToyTokenizer(), NUM_TOKENS, (ord("x"),))
    matcher = compile_matcher(vocabulary, wish_of("regex", "[a-z]{2}"))
    assert matcher.try_consume_tokens([ord("x")]) == 0


def test_a_grammar_that_forces_its_text_is_spelt_exactly() -> None:
    lark = '%llguidance {"no_forcing": false}\nstart: "<sep> a\u00e9"'
    matcher = compile_matcher(toy_vocabulary(), wish_of("grammar", lark))
    assert matcher.try_consume_tokens(list("<sep> aé".encode())) == 9
    assert matcher.is_stopped()
