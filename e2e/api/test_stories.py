"""What whole stories with real models hold: the same text however it is asked for, and nothing left behind."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from running_naru import RunningNaru, chat_body, eventually, stream_events

pytestmark = pytest.mark.smollm2
MEGABYTE = 2**20
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "string", "pattern": r"^\d{4}-\d{2}$"},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"q', "č", 2.5]}, "maxItems": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": PERSON}}
LONG = {"max_tokens": 2000, "ignore_eos": True}
"""Many seconds on any processor."""
LEFT_ALONE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat_body("Tell me a story.", stream=True, **LONG)),
    ("/v1/chat/completions", chat_body("Tell me a story.", n=3, use_beam_search=True, **LONG)),
    ("/v1/completions", {"model": "smollm2", "prompt": "Once", "n": 4, **LONG}),
    ("/v1/embeddings", {"model": "minilm", "input": ["word " * 240] * 500}),
    ("/v1/responses", {"model": "smollm2", "input": "Tell me a story.", "max_output_tokens": 2000}),
    ("/v2/models/smollm2/generate_stream", {"text_input": "Once", **LONG}),
]


def texts(answer: dict[str, Any]) -> list[str]:
    """Of the choices, or the arguments of their calls."""
    found = []
    for choice in answer["choices"]:
        calls = choice["message"].get("tool_calls") or []
        found.append((choice["message"]["content"] or "") + "".join(call["function"]["arguments"] for call in calls))
    return found


def streamed(api: RunningNaru, body: dict[str, Any]) -> list[str]:
    """The same of a stream."""
    found = [""] * body.get("n", 1)
    with api.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        events = list(stream_events(response.iter_lines()))
    assert events.pop() is None
    for event in events:
        assert event is not None and "error" not in event
        for choice in event["choices"]:
            calls = choice["delta"].get("tool_calls") or []
            found[choice["index"]] += choice["delta"].get("content") or ""
            found[choice["index"]] += "".join(call["function"].get("arguments") or "" for call in calls)
    return found


@pytest.mark.parametrize(
    "how",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}, "n": 3},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "n": 2},
    ],
)
def test_structures_are_kept_and_are_the_same_streamed_and_whole(api: RunningNaru, how: dict[str, Any]) -> None:
    body = {**chat_body("Invent a person."), "temperature": 1, "seed": 11, "max_tokens": 200, **how}
    whole = api.http.post("/v1/chat/completions", json=body).json()
    assert texts(whole) == streamed(api, body)
    for text in texts(whole):
        person = json.loads(text)
        assert set(person) == {"name", "born", "tags"} and re.fullmatch(r"\d{4}-\d{2}", person["born"])
        assert set(person["tags"]) <= {"a", 'b"q', "č", 2.5} and len(person["name"]) <= 12


def test_clients_that_leave_cost_nothing_more(api: RunningNaru) -> None:
    host, _, port = api.url.removeprefix("http://").rpartition(":")
    with ThreadPoolExecutor(len(LEFT_ALONE)) as pool:
        sockets = list(pool.map(lambda asked: ask(host, int(port), *asked), LEFT_ALONE))
        eventually(lambda: num_alive(api) >= len(LEFT_ALONE) - 2, 20, "they run")
        for each in sockets:
            each.close()
    eventually(lambda: num_alive(api) == 0, 20, "nothing runs for them")
    page = api.http.get("/metrics").text
    assert set(re.findall(r"naru_router_requests_in_flight\{[^}]*\} (\S+)", page)) == {"0.0"}


def ask(host: str, port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request whose reply nobody will read."""
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, port))
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def num_alive(api: RunningNaru) -> int:
    (lease,) = api.leases().values()
    return int(lease["num_running"] + lease["num_waiting"] + sum(m["num_in_flight"] for m in lease["models"].values()))


def test_a_large_reply_leaves_its_connection_in_order(api: RunningNaru) -> None:
    body = {"model": "minilm", "input": [f"text {i}" for i in range(1024)], "encoding_format": "base64"}
    with httpx.Client(base_url=api.url, timeout=60, trust_env=False) as client:
        for _ in range(2):
            reply = client.post("/v1/embeddings", json=body)
            assert [item["index"] for item in reply.json()["data"]] == list(range(1024))
            assert client.post("/v1/embeddings", json={"model": "minilm", "input": "x"}).status_code == 200


def test_bodies_of_refused_requests_are_forgotten(api: RunningNaru) -> None:
    (router,) = [child for child in api.children() if "naru_router" in " ".join(child.cmdline())]
    body = json.dumps({"model": "smollm2", "messages": 5, "input": 5, "prompt": {"a": "a" * 7 * MEGABYTE}}).encode()
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/completions")

    def refuse_each() -> int:
        for path in paths * 3:
            assert api.http.post(path, content=body).status_code == 400
        return psutil.Process(router.pid).memory_info().rss

    first = refuse_each()
    assert refuse_each() - first < 40 * MEGABYTE, "12 bodies of 7 MB"


def test_a_schema_that_explodes_is_refused_while_others_go_on(api: RunningNaru) -> None:
    bomb = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a{1,1000}){1,1000}"}}}
    form = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": bomb}}
    other = chat_body("Count to ten.", max_tokens=40)
    solo = texts(api.http.post("/v1/chat/completions", json=other).json())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streamed, api, other)
        for path in ("/v1/chat/completions", "/v1/completions"):
            refused = api.http.post(path, json={**chat_body("x", response_format=form), "prompt": "x"})
            assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("response_format")
        assert running.result() == solo
