"""Messages of turns: the same blocks wherever the text is cut, and events from which a client makes the same ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import CUTS, TURNS, Piece, events_of

from naru_router.core.anthropic.reply import BROKEN_INPUT, MessageOutput, parsed_input
from naru_router.core.anthropic.request import Thinking

SHOWN = Thinking(is_shown=True)
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def told_and_made(pieces: list[Piece], cuts: list[int], thinking: Thinking = SHOWN) -> tuple[list[Any], list[Any]]:
    output = MessageOutput(thinking)
    told = [each for event in events_of(pieces, cuts) for each in output.add(event)]
    return told, output.content()


def replay(told: list[Any]) -> list[Any]:
    """What a client makes of the events."""
    blocks: list[Any] = []
    texts: list[str] = []
    is_open = False
    for event in told:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            texts, is_open = [], True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            else:
                assert delta[DELTAS[delta["type"]]]
                texts.append(delta[DELTAS[delta["type"]]])
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            kind, text, is_open = blocks[-1]["type"], "".join(texts), False
            blocks[-1]["input" if kind == "tool_use" else kind] = parsed_input(text) if kind == "tool_use" else text
    assert not is_open
    return blocks


@given(pieces=TURNS, cuts=CUTS, thinking=st.sampled_from([SHOWN, Thinking(), Thinking(True, True)]))
def test_any_cut_gives_the_same_blocks_and_its_events_tell_them(
    pieces: list[Piece], cuts: list[int], thinking: Thinking
) -> None:
    _, whole = told_and_made(pieces, [], thinking)
    told, made = told_and_made(pieces, cuts, thinking)
    assert made == whole
    assert replay(told) == made


def test_a_turn_becomes_blocks_in_its_order() -> None:
    pieces = [Piece("reasoning", "hm"), Piece("text", "Let me look."), Piece("call", '{"a": 1}'), Piece("call", "")]
    _, made = told_and_made(pieces, [])
    assert made == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_2", "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_3", "name": "look", "input": {}},
    ]


def test_thinking_that_nobody_asked_for_is_not_told() -> None:
    pieces = [Piece("reasoning", "hm"), Piece("text", "Yes.")]
    told, made = told_and_made(pieces, [1], Thinking())
    assert made == [{"type": "text", "text": "Yes."}]
    assert "hm" not in str(told)
    told, made = told_and_made(pieces, [1], Thinking(is_shown=True, is_emptied=True))
    assert made[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert "hm" not in str(told)


@pytest.mark.parametrize("text", ["{", "[1]", "null", '{"a": NaN}', '{"a":' * 300 + "1" + "}" * 300, "x"])
def test_arguments_that_are_no_object_are_told_as_they_are(text: str) -> None:
    assert parsed_input(text) == {BROKEN_INPUT: text}
