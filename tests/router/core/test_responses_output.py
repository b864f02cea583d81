"""Output items of turns: the same ones wherever the text is cut, and events from which a client makes the same ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import CUTS, TURNS, Piece, events_of

from naru_router.core.responses.output import OutputItems


def told_and_made(pieces: list[Piece], cuts: list[int], finish: str = "stop") -> tuple[list[Any], list[Any]]:
    output = OutputItems("id", has_logprobs=False)
    told = [each for event in events_of(pieces, cuts, finish) for each in output.add(event)]
    return told, output.items()


def replay(told: list[Any]) -> list[Any]:
    """What a client makes of the events, checking that each is where it may be."""
    items: list[Any] = []
    text, done = "", True
    for event in told:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == (len(items) if kind == "output_item.added" else len(items) - 1)
        if kind == "output_item.added":
            assert done
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text, done = "", False
            continue
        assert not done
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        elif kind == "output_item.done":
            items[-1], done = event["item"], True
        else:
            assert kind == "content_part.added"
            assert event["part"]["text"] == ""
    assert done
    return items


@given(pieces=TURNS, cuts=CUTS, finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_cut_gives_the_same_items_and_its_events_tell_them(
    pieces: list[Piece], cuts: list[int], finish: str
) -> None:
    _, whole = told_and_made(pieces, [], finish)
    told, made = told_and_made(pieces, cuts, finish)
    assert made == whole
    assert replay(told) == made
    assert {item["status"] for item in made[:-1]} <= {"completed"}
    assert made[-1]["status"] == ("incomplete" if finish == "length" else "completed")
    assert len({item["id"] for item in made}) == len(made)


def test_a_turn_becomes_items_in_its_order() -> None:
    pieces = [Piece("reasoning", "hm"), Piece("text", "Look."), Piece("call", '{"a": 1}'), Piece("call", "{}")]
    _, made = told_and_made(pieces, [2])
    done = {"status": "completed"}
    part = {"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "name": "look", **done}
    assert made == [
        {"id": "rs_id_0", "type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        | done,
        {"id": "msg_id_1", "type": "message", "role": "assistant", "content": [part], **done},
        {"id": "fc_id_2", "call_id": "call_2", "arguments": '{"a": 1}', **call},
        {"id": "fc_id_3", "call_id": "call_3", "arguments": "{}", **call},
    ]


@pytest.mark.parametrize(("kind", "name"), [("text", "output_text"), ("reasoning", "reasoning_text")])
def test_the_parts_of_an_item_are_told_with_their_places(kind: str, name: str) -> None:
    told, _ = told_and_made([Piece(kind, "ab")], [1])
    assert [event["type"] for event in told] == [
        "response.output_item.added",
        "response.content_part.added",
        f"response.{name}.delta",
        f"response.{name}.delta",
        f"response.{name}.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert {event["content_index"] for event in told[1:-1]} == {0}
