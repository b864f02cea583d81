"""From a client's wish to a matcher that has taken nothing yet, or the reason why there is none.

Called by the grammar compiler in a thread with a deep stack: chains of references are followed by recursion.

JSON comes without blanks between its parts: a model could otherwise go on with them for ever. Of a schema, what the
library does not enforce is refused, not ignored; keywords that no draft of JSON Schema gives a meaning are, as the
standard says, only remarks.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.engine.grammar_matcher import reason_of
from naru_worker.adapters.engine.grammar_vocabulary import GrammarVocabulary
from naru_worker.core.pattern_size import pattern_size, patterns_of_schema
from naru_worker.core.structured import StructuredKind, StructuredOutput

MAX_PATTERN_CHARS = 20_000
"""Of a regular expression with its counted repetitions written out: of a million, a single mask takes a second."""


_NO_FORCING = '%llguidance {"no_forcing": true}'


def compile_matcher(vocabulary: GrammarVocabulary, wish: StructuredOutput) -> LLMatcher:
    """A matcher at the start of the text.

    Raises:
        InvalidRequest: it cannot be understood or kept, it is too large, or no text matches.
    """
    try:
        _check_patterns(wish)
        matcher = LLMatcher(vocabulary.native, _grammar(wish), log_level=0, limits=_limits())
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


def _grammar(wish: StructuredOutput) -> str:
    if wish.kind is StructuredKind.CHOICE:
        # One terminal, so that all of them are looked at together.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(wish.texts))
        return _unforced(f"start: CHOICE\nCHOICE: {texts}")
    (text,) = wish.texts
    if wish.kind is StructuredKind.REGEX:
        return _unforced(f"start: /{regex_to_lark(text, use_ascii='d')}/")
    if wish.kind is StructuredKind.GRAMMAR:
        return _unforced(text)
    if '"x-guidance"' in text:
        raise ValueError("x-guidance is no keyword of JSON Schema; leave it out")
    schema = LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
    )
    (part,) = json.loads(schema)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": _unforced(f"start: @{part['name']}")}, part]})


def _unforced(lark: str) -> str:
    """Without tokens that are forced where a text is: the tokenizer would be asked for them, under Python's lock.

    Which tokens spell such a text is left to the model, which knows.
    """
    return lark if "%llguidance" in lark else f"{lark}\n{_NO_FORCING}\n"


def _check_patterns(wish: StructuredOutput) -> None:
    if wish.kind is StructuredKind.CHOICE:
        return
    (text,) = wish.texts
    patterns = patterns_of_schema(json.loads(text)) if wish.kind is StructuredKind.JSON_SCHEMA else [text]
    most = max(map(pattern_size, patterns), default=0)
    if most > MAX_PATTERN_CHARS:
        raise ValueError(
            f"a pattern has {most} characters with its repetitions written out; at most {MAX_PATTERN_CHARS} are allowed"
        )


def _limits() -> LLParserLimits:
    # What is quoted to the client must be the client's own words, not the state of a parser.
    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=500_000, max_lexer_states=50_000)


def _refusal(wish: StructuredOutput, reason: str) -> InvalidRequest:
    return InvalidRequest(f"the {wish.kind.value} cannot be used: {reason}", param=wish.param)
