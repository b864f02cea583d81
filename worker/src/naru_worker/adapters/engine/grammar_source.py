"""From a client's wish to a matcher that has taken nothing yet, or the reason why there is none.

Called by the grammar compiler in a thread with a deep stack: chains of references are followed by recursion.

JSON comes without blanks between its parts: a model could otherwise go on with them for ever. Of a schema, what the
library does not enforce is refused, not ignored; keywords that no draft of JSON Schema gives a meaning are, as the
standard says, only remarks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.engine.grammar_matcher import reason_of
from naru_worker.adapters.engine.grammar_vocabulary import GrammarVocabulary
from naru_worker.core.pattern_size import pattern_size, patterns_of_lark, patterns_of_schema
from naru_worker.core.schema_shape import fault_of_schema, make_dates_exact
from naru_worker.core.structured import StructuredKind, StructuredOutput

MAX_PATTERN_CHARS = 20_000
"""Of a regular expression with its counted repetitions written out: of a million, a single mask takes a second."""
MAX_STEP_ITEMS = 8000
"""Of the parser for one token: what an ambiguous grammar may cost. Schemas need some hundreds. At this limit a mask of
50 000 tokens takes less than 10 ms, and at the library's own one 1.6 s; the steps of all other requests wait for it."""
MAX_STEP_FUEL = 100_000
"""Of the lexer for one token; about 7 ms."""

_UNFORCED = '%llguidance {"no_forcing": true}\n'


def compile_matcher(vocabulary: GrammarVocabulary, wish: StructuredOutput) -> LLMatcher:
    """A matcher at the start of the text.

    Raises:
        InvalidRequest: it cannot be understood or kept, it is too large, or no text matches.
    """
    try:
        schema = _checked_schema(wish) if wish.kind is StructuredKind.JSON_SCHEMA else None
        _check_patterns(wish, schema)
        matcher = LLMatcher(vocabulary.native, _grammar(wish, schema), log_level=0, limits=_limits())
    except (ValueError, RecursionError) as exc:
        raise _refusal(wish, str(exc)) from exc
    if matcher.is_error():
        raise _refusal(wish, reason_of(matcher))
    # Much is found out by the first mask alone.
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    if probe.is_error():
        reason = reason_of(probe)
        raise _refusal(wish, "no text matches it" if reason.startswith("NoExtension") else reason)
    return matcher


def _grammar(wish: StructuredOutput, schema: Any) -> str:
    if wish.kind is StructuredKind.CHOICE:
        # One terminal, so that all of them are looked at together.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(wish.texts))
        return f"{_UNFORCED}start: CHOICE\nCHOICE: {texts}"
    (text,) = wish.texts
    if wish.kind is StructuredKind.REGEX:
        return f"{_UNFORCED}start: /{regex_to_lark(text, use_ascii='d')}/"
    if wish.kind is StructuredKind.GRAMMAR:
        return _unforced({"name": "grammar", "lark_grammar": text})
    if make_dates_exact(schema):
        text = json.dumps(schema)
    grammar = LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
    )
    (part,) = json.loads(grammar)["grammars"]
    return _unforced(part)


def _unforced(part: dict[str, Any]) -> str:
    """Without tokens that are forced where a text is, whatever the part itself says of it.

    The tokenizer would be asked for them, under Python's lock, and the longest text that is forced be found, which may
    be a million characters long. Which tokens spell such a text is left to the model, which knows.
    """
    return json.dumps({"grammars": [{"lark_grammar": f"{_UNFORCED}start: @{part['name']}"}, part]})


def _checked_schema(wish: StructuredOutput) -> Any:
    try:
        schema = json.loads(wish.texts[0], parse_constant=_no_number)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is no JSON: {exc}") from exc
    fault = fault_of_schema(schema)
    if fault:
        raise ValueError(fault)
    # Read as JSON, so that no other spelling of the name is let through. The library takes its options there alone.
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError("x-guidance is no keyword of JSON Schema; leave it out")
    return schema


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"it is no JSON: {name} is no number")


def _check_patterns(wish: StructuredOutput, schema: Any) -> None:
    if wish.kind is StructuredKind.CHOICE:
        return
    (text,) = wish.texts
    patterns: Iterable[str] = [text]
    if wish.kind is StructuredKind.JSON_SCHEMA:
        patterns = patterns_of_schema(schema)
    elif wish.kind is StructuredKind.GRAMMAR:
        patterns = patterns_of_lark(text)
    most = max(map(pattern_size, patterns), default=0)
    if most > MAX_PATTERN_CHARS:
        raise ValueError(
            f"a pattern has {most} characters with its repetitions written out; at most {MAX_PATTERN_CHARS} are allowed"
        )


def _limits() -> LLParserLimits:
    # What is quoted to the client must be the client's own words, not the state of a parser.
    return LLParserLimits(
        verbose_errors=False,
        initial_lexer_fuel=500_000,
        max_lexer_states=50_000,
        step_max_items=MAX_STEP_ITEMS,
        step_lexer_fuel=MAX_STEP_FUEL,
    )


def _refusal(wish: StructuredOutput, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {wish.kind.value} cannot be used: {reason}", param=wish.param)
