"""Items of the Responses API as messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import ChatMessage, ToolCall
from naru_router.core.responses.conversation import messages_of
from naru_router.core.responses.items import read_items
from naru_router.core.responses.request import parse_response
from naru_router.core.responses.stored import items_after, page_of, record_of

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def messages(*items: Any, instructions: str = "") -> tuple[ChatMessage, ...]:
    return messages_of(instructions, read_items(list(items), "id"))


def test_what_an_assistant_did_in_one_turn_is_one_message() -> None:
    found = messages(said("user", "q"), THOUGHT, said("assistant", "Look."), CALL, RESULT, said("assistant", "Found."))
    assert found == (
        ChatMessage("user", "q"),
        ChatMessage("assistant", "Look.", tool_calls=(ToolCall("c1", "look", '{"a": 1}'),), reasoning="hm"),
        ChatMessage("tool", "found", name="look", tool_call_id="c1"),
        ChatMessage("assistant", "Found."),
    )


def test_turns_without_anything_between_them_stay_apart() -> None:
    found = messages(said("assistant", "a"), said("assistant", "b"), CALL, THOUGHT, said("assistant", "c"))
    assert [(message.content, len(message.tool_calls), message.reasoning) for message in found] == [
        ("a", 0, ""),
        ("b", 1, ""),
        ("c", 0, "hm"),
    ]


def test_instructions_and_the_first_system_messages_are_one() -> None:
    found = messages(said("system", "b"), said("developer", "c"), said("user", "q"), instructions="a")
    assert found == (ChatMessage("system", "a\n\nb\n\nc"), ChatMessage("user", "q"))
    later = messages(said("user", "q"), said("developer", "c"))
    assert [message.role for message in later] == ["user", "developer"]


def test_an_output_without_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'c1'"):
        messages(RESULT, CALL)


def test_items_keep_their_ids_and_others_get_fresh_ones() -> None:
    items = read_items([{**CALL, "id": "fc_own"}, RESULT, THOUGHT, said("user", "q")], "id")
    assert [item["id"] for item in items] == ["fc_own", "fco_id_in1", "rs_id_in2", "msg_id_in3"]
    assert read_items(items, "other") == items


def test_a_stored_response_is_gone_on_from_with_all_before_it() -> None:
    first = parse_response({"model": "m", "input": "one", "store": True}, "id")
    output = read_items([said("assistant", "two")], "out")
    record = record_of({"id": "resp_x", "output": output}, first.items)
    second = parse_response({"model": "m", "input": "three", "previous_response_id": "resp_x"}, "next")
    assert second.chat(items_after(record)).messages == (
        ChatMessage("user", "one"),
        ChatMessage("assistant", "two"),
        ChatMessage("user", "three"),
    )


@given(count=st.integers(0, 30), limit=st.integers(1, 12), order=st.sampled_from(["asc", "desc"]))
def test_pages_of_input_hold_every_item_once_in_order(count: int, limit: int, order: str) -> None:
    items = [{"id": f"i{number}"} for number in range(count)]
    seen: list[Any] = []
    after = ""
    while True:
        page: Any = page_of(items, {"limit": str(limit), "order": order, "after": after})
        seen += page["data"]
        if not page["has_more"]:
            break
        assert len(page["data"]) == limit
        after = page["last_id"]
    assert seen == (items if order == "asc" else items[::-1])


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "no"}])
def test_queries_that_make_no_sense_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page_of([{"id": "i"}], query)
    assert caught.value.param == next(iter(query))
