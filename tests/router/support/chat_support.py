"""Chats with tools: templates of several families, two tools, and what a stream's deltas come to."""

from __future__ import annotations

from typing import Any

import httpx
from router_rig import CHAT, Rig, body, info
from stub_worker import Script, StubWorker

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.id }} "
    "{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% if m.tool_call_id is defined %}"
    "(for {{ m.tool_call_id }}){% endif %}{% endfor %}"
)
HERMES = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{# <tool_call> #}" + TURNS
THINKER = HERMES + "{# <think> #}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OPENED = HERMES + "<think>\n"
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{# [TOOL_CALLS] #}" + TURNS
LLAMA = "{# <|start_header_id|> parameters #}{{ tools | tojson }}" + TURNS
CHANNELS = "{# <|channel|><|message|> #}{{ tools | tojson }}" + TURNS + "<|start|>assistant"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS
PRICE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "stock_price",
        "description": "Of a share.",
        "parameters": {"type": "object", "properties": {"ticker": {"type": "string"}}, "required": ["ticker"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [PRICE, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
CALL_A = '<tool_call>\n{"name": "stock_price", "arguments": {"ticker": "A\\n\\u2028B"}}\n</tool_call>'
CALL_B = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
TWO_CALLS = [*f"{CALL_A}\n{CALL_B}"]


async def chat_rig(rig: Rig, script: Script | None = None, template: str = HERMES) -> StubWorker:
    await rig.publish_model()
    worker = await rig.start_worker(script=script, facts=info(template))
    await rig.start_router()
    return worker


def deltas_of(chunks: list[Any], index: int = 0) -> list[dict[str, Any]]:
    return [c["delta"] for e in chunks if e != "[DONE]" for c in e["choices"] if c["index"] == index]


def message_of(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas come to; each delta is checked on the way."""
    first, *rest, last = deltas_of(chunks, index)
    assert set(first) == {"role", "content"} and first["role"] == "assistant" and last == {}
    assert first["content"] == (None if rest and "content" not in rest[0] else "")
    texts, thoughts = "", ""
    calls: list[dict[str, Any]] = []
    for delta in rest:
        if "content" in delta:
            assert set(delta) == {"content"} and delta["content"]
            texts += delta["content"]
        elif "reasoning_content" in delta:
            assert delta["reasoning_content"] == delta["reasoning"] != ""
            thoughts += delta["reasoning"]
        else:
            assert set(delta) == {"tool_calls"}
            (call,) = delta["tool_calls"]
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                assert call["function"]["name"] and call["function"]["arguments"] == ""
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                assert call["index"] == len(calls) - 1 and call["function"]["arguments"]
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": texts, "refusal": None}
    if thoughts or calls:
        message["content"] = texts or None
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def reasons_of(chunks: list[Any]) -> list[tuple[int, str]]:
    return [(c["index"], c["finish_reason"]) for e in chunks[:-1] for c in e["choices"] if c["finish_reason"]]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


async def both(rig: Rig, **fields: Any) -> tuple[dict[str, Any], str]:
    """(message, finish reason), the same whole and streamed."""
    response = await rig.post(CHAT, body(CHAT, **fields))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    chunks = await rig.stream(CHAT, body(CHAT, **fields))
    assert chunks[-1] == "[DONE]" and reasons_of(chunks) == [(0, choice["finish_reason"])]
    assert without_ids(message_of(chunks)) == without_ids(choice["message"])
    return choice["message"], choice["finish_reason"]


def refused_param(response: httpx.Response) -> str:
    """The field that an error of the client names."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    return str(error["param"])
