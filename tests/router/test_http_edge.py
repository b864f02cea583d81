"""The HTTP edge itself: routes, ids, limits, raw framing, pages."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, events, simple
from stub_worker import hang, say

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


async def raw(rig: Rig, data: bytes, *, half_close: bool = False) -> bytes:
    """Everything the router answers on one connection until it closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port)
    try:
        writer.write(data)
        await writer.drain()
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def request(path: str, content: bytes, *, headers: str = "", length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + f"content-length: {size}\r\n\r\n".encode() + content


@BOTH
async def test_a_stream_is_exactly_its_events_in_chunks(rig: Rig, path: str) -> None:
    await simple(rig, say("a", "b\n\ndata: c"))
    answer = await raw(rig, request(path, json.dumps(body(path, stream=True)).encode()))
    head, _, payload = answer.partition(b"\r\n\r\n")
    headers = {k.strip(): v.strip() for k, _, v in (h.partition(":") for h in head.decode().lower().split("\r\n")[1:])}
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "no-cache" in headers["cache-control"] and headers["x-accel-buffering"] == "no"
    pieces = []
    while payload:
        size, _, rest = payload.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        payload = rest[int(size, 16) + 2 :]
    assert pieces.pop() == b""
    # No event is cut by a write, and nothing stands between events.
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in pieces)
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n") and b"\r" not in b"".join(pieces)
    assert len(events(b"".join(pieces))) == (5 if path == CHAT else 4)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@BOTH
async def test_another_method_is_405_in_openais_form(rig: Rig, path: str, method: str) -> None:
    await rig.start_router()
    response = await rig.client.request(method, path)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_unknown_path_is_404_in_openais_form(rig: Rig) -> None:
    await rig.start_router()
    for path in ("/", "/v1", "/v1/chat/completions/", "/v1/embeddings", "/v1/models/nope", "/%00"):
        response = await rig.client.get(path)
        assert response.status_code in (404, 405) and set(response.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
    assert (await rig.client.post("/healthz")).status_code == 405


async def test_the_request_id_is_taken_or_made(rig: Rig) -> None:
    await simple(rig)
    good = {"x-request-id": "abc-1.2_3:x"}
    assert (await rig.client.post(CHAT, json=body(CHAT), headers=good)).headers["x-request-id"] == "abc-1.2_3:x"
    assert (await rig.client.post(CHAT, json=body(CHAT, n=0), headers=good)).headers["x-request-id"] == "abc-1.2_3:x"
    made = set()
    for bad in (b"", b"x" * 129, b"a b", "é".encode("latin-1"), b"<script>"):
        response = await rig.client.post(CHAT, json=body(CHAT), headers={b"x-request-id": bad})
        made.add(response.headers["x-request-id"])
    assert len(made) == 5 and all(len(i) == 32 for i in made)
    assert (await rig.client.get("/nowhere")).headers["x-request-id"]


async def test_equal_request_ids_do_not_meet_on_the_worker(rig: Rig) -> None:
    worker = await simple(rig, hang())
    same = {"x-request-id": "same"}
    first, second = (asyncio.create_task(rig.client.post(CHAT, json=body(CHAT), headers=same)) for _ in range(2))
    await worker.until(lambda: len(worker.running) == 2)
    first.cancel()
    await worker.until(lambda: len(worker.running) == 1)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


@pytest.mark.parametrize("is_declared", [True, False])
@BOTH
async def test_a_body_above_the_limit_is_refused_without_reading_it(rig: Rig, path: str, is_declared: bool) -> None:
    await simple(rig, max_body_bytes=10_000)
    if is_declared:
        data = request(path, b"{", length=10**12)  # never sent: the answer must not wait for it
    else:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        data = head.encode() + b"1000\r\n" + b" " * 0x1000 + b"\r\n"
        data += (b"1000\r\n" + b" " * 0x1000 + b"\r\n") * 3
    answer = await raw(rig, data)
    assert answer.startswith(b"HTTP/1.1 400") and b"10000 bytes" in answer
    assert b"connection: close" in answer.lower()
    fits = json.dumps(body(path, x="y" * 9000)).encode()
    assert (await raw(rig, request(path, fits))).startswith(b"HTTP/1.1 200")


async def test_a_client_that_leaves_in_its_body_leaves_nothing_behind(rig: Rig) -> None:
    await simple(rig)
    await raw(rig, request(CHAT, b'{"model":', length=1000), half_close=True)
    await rig.until(lambda: rig.app.gate.num_inside == 0)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200


async def test_nothing_waits_for_more_to_fill_a_packet(rig: Rig) -> None:
    """A reply in two writes would wait 40 ms for the client's acknowledgement."""
    await simple(rig)
    assert (await rig.client.get("/healthz")).status_code == 200
    sockets = [c.transport.get_extra_info("socket") for c in rig.app._http.connections]
    assert sockets and all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


async def test_models_are_listed_with_their_aliases(rig: Rig) -> None:
    await rig.publish_model("org/big", aliases=("big",))
    await simple(rig)
    listed = (await rig.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(m["id"], m["root"], m["ready_workers"]) for m in listed["data"]] == [
        ("big", "org/big", 0),
        ("org/big", "org/big", 0),
        (MODEL, MODEL, 1),
    ]
    one = (await rig.client.get(f"/v1/models/{MODEL}")).json()
    assert one == listed["data"][2] and (one["object"], one["created"]) == ("model", 1700000000)
    assert one["max_model_len"] == 2048
    assert (await rig.client.get("/v1/models/org/big")).json()["id"] == "org/big"
    missing = await rig.client.get("/v1/models/none")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


async def test_readiness_tells_what_is_there(rig: Rig) -> None:
    await simple(rig)
    detail = (await rig.client.get("/readyz")).json()
    assert detail["status"] == "ready" and detail["registry"]["up"] is True
    assert detail["models"] == {MODEL: 1} and detail["workers"] == {"leased": 1, "connected": 1}


async def test_metrics_count_what_happened(rig: Rig) -> None:
    await simple(rig)
    await rig.post(CHAT, body(CHAT))
    await rig.stream(CHAT, body(CHAT))
    await rig.post(CHAT, body(CHAT, n=0))
    await rig.post(COMPLETION, {**body(COMPLETION), "model": "made-up-name"})
    response = await rig.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert lines['naru_router_requests_total{endpoint="chat",model="tiny-a",status="200"}'] == "2.0"
    assert lines['naru_router_requests_total{endpoint="chat",model="",status="400"}'] == "1.0"
    assert lines['naru_router_requests_total{endpoint="completion",model="",status="404"}'] == "1.0"
    assert lines['naru_router_time_to_first_token_seconds_count{endpoint="chat",model="tiny-a"}'] == "1.0"
    assert lines['naru_router_worker_up{worker="w0"}'] == "1.0" and lines["naru_router_registry_up"] == "1.0"
    assert "made-up-name" not in response.text


async def test_a_slow_reader_loses_nothing(rig: Rig) -> None:
    texts = [f"{i} " + "x" * 4000 for i in range(2000)]
    await simple(rig, say(*texts))
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port, limit=2**16)
    writer.write(request(COMPLETION, json.dumps(body(COMPLETION, stream=True)).encode()))
    await rig.workers["w0"].until(lambda: bool(rig.workers["w0"].requests) and not rig.workers["w0"].running)
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert all(f'"{text}"'.encode() in data for text in texts[::200]) and b"data: [DONE]" in data


async def test_many_streams_at_once_do_not_mix(rig: Rig) -> None:
    async def script(request_: Any) -> Any:
        async for delta in say(*(f"{request_.text}{i}," for i in range(20)))(request_):
            yield delta

    await simple(rig, script)
    asked = [rig.stream(COMPLETION, body(COMPLETION, prompt=f"p{k}-")) for k in range(40)]
    for k, answer in enumerate(await asyncio.gather(*asked)):
        assert "".join(e["choices"][0]["text"] for e in answer[:-1]) == "".join(f"p{k}-{i}," for i in range(20))
