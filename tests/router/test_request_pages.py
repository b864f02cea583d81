"""Where requests went and why: the reply's header, the pages, and `naru explain request` on a running router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple
from stub_worker import fail, hang, say

from naru_operator.cli.main import cli
from naru_proto import names
from naru_proto.tenants import key_digest

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
PAGE = "/v1/naru/requests"
ROUTE = "/v1/naru/route"
PROMPT = "the beginning of a long document " * 20


async def trace_of(rig: Rig, request_id: str, key: str = "") -> dict[str, Any]:
    response = await rig.client.get(f"{PAGE}/{request_id}", headers={"x-api-key": key} if key else {})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@BOTH
async def test_a_reply_says_where_it_comes_from_to_whom_asks(rig: Rig, path: str) -> None:
    await simple(rig)
    for value, is_told in (("1", True), ("yes", True), ("0", False), ("false", False), ("", False)):
        for stream in (False, True):
            response = await rig.client.post(
                path, json=body(path, stream=stream), headers={names.HEADER_EXPLAIN: value}
            )
            assert (names.HEADER_ROUTE in response.headers) is is_told
    response = await rig.post(path, body(path))
    worker_id, *reasons = response.headers[names.HEADER_ROUTE].split("; ")
    assert worker_id == "w0" and any("to the first token" in reason for reason in reasons)


@BOTH
async def test_the_course_of_a_request_is_remembered_without_its_content(rig: Rig, path: str) -> None:
    await rig.publish_model()
    for i in range(2):
        await rig.start_worker(f"w{i}", say("Hel", "lo", cached=3))
    await rig.start_router()
    content = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
    sent = await rig.client.post(path, json={"model": MODEL, **content}, headers={names.HEADER_REQUEST_ID: "my/id:1"})
    trace = await trace_of(rig, "my/id:1")
    assert (trace["request_id"], trace["model"], trace["outcome"]) == ("my/id:1", MODEL, "served")
    assert trace["route_keys"] == len(PROMPT) // 64 or path == CHAT
    (attempt,) = trace["attempts"]
    assert attempt["worker"] == sent.headers[names.HEADER_ROUTE].split(";")[0] and attempt["outcome"] == "served"
    assert attempt["cached_tokens"] == 0 and set(attempt["scores_s"]) == {"w0", "w1"} and attempt["reasons"]
    assert 0 <= attempt["sent_at_s"] <= attempt["first_output_at_s"] <= trace["total_s"]
    assert "beginning" not in json.dumps(trace)
    assert (await rig.client.get(f"{PAGE}/another")).status_code == 404


async def test_failures_and_second_tries_are_in_the_course(rig: Rig) -> None:
    await rig.publish_model()
    for i in range(2):
        await rig.start_worker(f"w{i}", fail("internal_error", "its engine broke", retryable=True))
    await rig.start_router()
    await rig.client.post(CHAT, json=body(CHAT), headers={names.HEADER_REQUEST_ID: "failed"})
    trace = await trace_of(rig, "failed")
    assert trace["outcome"] == "internal_error: its engine broke"
    assert [attempt["outcome"] for attempt in trace["attempts"]] == ["worker_error: its engine broke"] * 2
    assert {attempt["worker"] for attempt in trace["attempts"]} == {"w0", "w1"}


async def test_a_request_that_runs_or_was_left_by_its_client_says_so(rig: Rig) -> None:
    worker = await simple(rig, hang("a"))
    headers = {names.HEADER_REQUEST_ID: "left"}
    request = asyncio.create_task(rig.client.post(CHAT, json=body(CHAT, stream=True), headers=headers))
    await worker.until(lambda: len(worker.running) == 1)
    assert (await trace_of(rig, "left"))["outcome"] == "running"
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await worker.until(lambda: not worker.running)
    await rig.until(lambda: rig.app.gate.num_inside == 0)
    trace = await trace_of(rig, "left")
    assert trace["outcome"] == "cancelled" and [each["outcome"] for each in trace["attempts"]] == ["given up"]


async def test_a_tenant_sees_its_own_requests_alone(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    tenants = [{"name": name, "keys": [key_digest(f"nk-{name}")]} for name in ("a", "b")]
    path.write_text(json.dumps({"tenants": tenants}))
    await rig.publish_model()
    await rig.publish_model("hidden", allow=("b",))
    await rig.start_worker(models=(MODEL, "hidden"))
    await rig.start_router(tenants_file=str(path))
    for name, model in (("a", MODEL), ("b", "hidden")):
        headers = {"x-api-key": f"nk-{name}", names.HEADER_REQUEST_ID: "same"}
        asked = {**body(CHAT), "model": model}
        assert (await rig.client.post(CHAT, json=asked, headers=headers)).status_code == 200
    assert (await trace_of(rig, "same", "nk-a"))["model"] == MODEL
    assert (await trace_of(rig, "same", "nk-b"))["model"] == "hidden"
    assert (await rig.client.get(f"{PAGE}/same")).status_code == 401
    for key, status in (("nk-a", 404), ("nk-b", 200), ("", 401)):
        headers = {"x-api-key": key} if key else {}
        asked = {"model": "hidden", "prompt": "hi"}
        assert (await rig.client.post(ROUTE, json=asked, headers=headers)).status_code == status


@BOTH
async def test_where_a_request_would_go_is_where_it_goes(rig: Rig, path: str) -> None:
    await rig.publish_model()
    workers = [await rig.start_worker(f"w{i}") for i in range(4)]
    await rig.start_router()
    for number in range(6):
        text = f"{number} {PROMPT}"
        content = {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}
        asked = {"model": MODEL, **content}
        told = await rig.client.post(ROUTE, json=asked)
        assert told.status_code == 200 and told.json()["outcome"] == "not sent"
        sent = await rig.client.post(path, json=asked)
        assert sent.headers[names.HEADER_ROUTE].startswith(told.json()["attempts"][0]["worker"] + ";")
    assert sum(len(worker.requests) for worker in workers) == 6


async def test_to_ask_where_a_request_would_go_loads_nothing(rig: Rig) -> None:
    await rig.publish_model(on_demand=True)
    worker = await rig.start_worker(models=())
    await rig.start_router()
    chat = await rig.client.post(ROUTE, json=body(CHAT))
    assert chat.status_code == 503 and "template" in chat.json()["error"]["message"]
    plain = await rig.client.post(ROUTE, json=body(COMPLETION))
    assert plain.status_code == 200 and plain.json()["attempts"][0]["held"] is True
    assert worker.requests == [] and worker.moves == []


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"model": MODEL}, 400),
        ({"model": MODEL, "prompt": 5}, 400),
        ({"model": "unknown", "prompt": "hi"}, 404),
        ({"model": MODEL, "prompt": "hi", "priority": "soon"}, 400),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(rig: Rig, asked: object, status: int) -> None:
    await simple(rig)
    response = await rig.client.post(ROUTE, json=asked)
    assert response.status_code == status and response.json()["error"]["message"]
    assert (await rig.client.get(ROUTE)).status_code == 405


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def naru(rig: Rig) -> Callable[..., Any]:
    """Runs `naru explain request` beside the router, which is in this event loop."""

    async def run(*arguments: str, urls: tuple[str, ...] = ()) -> Result:
        flags = [f"--url={url}" for url in urls or (str(rig.client.base_url),)]
        return await asyncio.to_thread(CliRunner().invoke, cli, ["explain", "request", *arguments, *flags])

    return run


async def test_the_command_shows_a_request_in_words_and_as_json(rig: Rig, naru: Callable[..., Any]) -> None:
    await simple(rig)
    await rig.client.post(COMPLETION, json=body(COMPLETION), headers={names.HEADER_REQUEST_ID: "a/b"})
    shown = await naru("a/b")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"a/b for {MODEL}: served") and "1. w0: served" in shown.output
    assert "first output after" in shown.output
    assert json.loads((await naru("a/b", "-o", "json")).output)["outcome"] == "served"
    for unknown in ("other", "a?b#c", "../../metrics", "ä"):
        missing = await naru(unknown)
        assert missing.exit_code == 1 and "no router remembers a request" in missing.output


async def test_the_command_asks_every_router_though_one_is_gone(rig: Rig, naru: Callable[..., Any]) -> None:
    await simple(rig)
    await rig.client.post(COMPLETION, json=body(COMPLETION), headers={names.HEADER_REQUEST_ID: "x"})
    nobody = "http://127.0.0.1:1"
    shown = await naru("x", urls=(nobody, f"{rig.client.base_url}/v1/"))
    assert shown.exit_code == 0 and "served" in shown.output
    # It cannot be said that none remembers it.
    missing = await naru("y", urls=(nobody, str(rig.client.base_url)))
    assert missing.exit_code == 1 and "no router answers" in missing.output


async def test_the_command_shows_where_one_would_go(rig: Rig, naru: Callable[..., Any]) -> None:
    await rig.publish_model()
    for i in range(2):
        await rig.start_worker(f"w{i}")
    await rig.start_router()
    for flags in ((), ("--completion",)):
        shown = await naru("--model", MODEL, "--prompt", "hi", *flags)
        assert shown.exit_code == 0, shown.output
        assert f"a request for {MODEL}: not sent" in shown.output and "compared: w" in shown.output
    assert (await naru("--model", "unknown")).exit_code == 1
    assert (await naru("x", "--model", MODEL)).exit_code == 2
    assert all(not worker.requests for worker in rig.workers.values())


async def test_the_command_is_not_steered_by_what_routers_say(rig: Rig, naru: Callable[..., Any]) -> None:
    await simple(rig, fail("internal_error", "\x1b[2Jcleared\nnext", retryable=False))
    await rig.client.post(COMPLETION, json=body(COMPLETION), headers={names.HEADER_REQUEST_ID: "x"})
    shown = await naru("x")
    assert shown.exit_code == 0 and "\x1b" not in shown.output and "?[2Jcleared" in shown.output
