"""Responses that are stored on request: read again, gone on from, listed, deleted; and no tenant sees another's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from named_events import broken_stream, stream
from router_rig import MODEL, Rig
from stub_worker import StubWorker, say

from naru_proto.tenants import key_digest

PATH = "/v1/responses"
A, B = {"x-api-key": "nk-a"}, {"authorization": "Bearer nk-b"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", "store": True, **fields}


async def started(rig: Rig, folder: Path, tenants: tuple[str, ...] = ()) -> StubWorker:
    await rig.publish_model()
    worker = await rig.start_worker(script=say("Hel", "lo"))
    more: dict[str, Any] = {}
    if tenants:
        path = folder / "tenants.json"
        entries = [{"name": name, "keys": [key_digest(f"nk-{name}")]} for name in tenants]
        path.write_text(json.dumps({"tenants": entries}))
        more["tenants_file"] = str(path)
    await rig.start_router(files_dir=str(folder / "files"), **more)
    return worker


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stored_response_is_the_one_that_was_sent(rig: Rig, tmp_path: Path, streamed: bool) -> None:
    await started(rig, tmp_path)
    if streamed:
        sent = (await stream(rig, PATH, asked()))[-1]["response"]
    else:
        sent = (await rig.post(PATH, asked())).json()
    assert sent["store"] is True
    found = await rig.client.get(f"{PATH}/{sent['id']}")
    assert (found.status_code, found.json()) == (200, sent)


async def test_what_nobody_asked_to_keep_is_not_kept(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path)
    for fields in ({"store": False}, {"store": None}):
        sent = (await rig.post(PATH, asked(**fields))).json()
        assert (await rig.client.get(f"{PATH}/{sent['id']}")).status_code == 404
    assert not (tmp_path / "files").exists()


async def test_a_conversation_goes_on_from_what_is_stored(rig: Rig, tmp_path: Path) -> None:
    worker = await started(rig, tmp_path)
    first = (await rig.post(PATH, asked(input="one", instructions="Be brief."))).json()
    second = (await rig.post(PATH, asked(input="two", previous_response_id=first["id"]))).json()
    assert second["previous_response_id"] == first["id"]
    await rig.client.delete(f"{PATH}/{first['id']}")
    third = await rig.post(PATH, asked(input="three", previous_response_id=second["id"]))
    assert third.status_code == 200
    said = [f"user\n{text}<|im_end|>\n<|im_start|>assistant\nHello" for text in ("one", "two")]
    turns = "".join(f"<|im_start|>{text}<|im_end|>\n" for text in said)
    assert worker.requests[-1].text == f"{turns}<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    items = (await rig.client.get(f"{PATH}/{third.json()['id']}/input_items?order=asc")).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["one", "Hello", "two", "Hello", "three"]
    assert (items["first_id"], items["last_id"]) == (items["data"][0]["id"], items["data"][-1]["id"])


@pytest.mark.parametrize(
    "bad", ["resp_0123456789abcdef01234567", "resp_x", "../../etc/passwd", "", "resp_" + "a" * 300]
)
async def test_what_is_not_there_is_not_gone_on_from(rig: Rig, tmp_path: Path, bad: str) -> None:
    worker = await started(rig, tmp_path)
    if bad:
        response = await rig.post(PATH, asked(previous_response_id=bad))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "previous_response_id")
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        response = await rig.client.request(method, f"{PATH}/{bad or 'x'}{end}")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert worker.requests == []


async def test_a_tenant_neither_sees_nor_deletes_nor_goes_on_from_anothers(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path, ("a", "b"))
    sent = (await rig.client.post(PATH, json=asked(), headers=A)).json()
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert (await rig.client.request(method, f"{PATH}/{sent['id']}{end}", headers=B)).status_code == 404
        assert (await rig.client.request(method, f"{PATH}/{sent['id']}{end}")).status_code == 401
    response = await rig.client.post(PATH, json=asked(previous_response_id=sent["id"]), headers=B)
    assert response.status_code == 400
    assert (await rig.client.get(f"{PATH}/{sent['id']}", headers=A)).json() == sent


async def test_a_deleted_response_is_gone(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path)
    sent = (await rig.post(PATH, asked())).json()
    gone = (await rig.client.delete(f"{PATH}/{sent['id']}")).json()
    assert gone == {"id": sent["id"], "object": "response", "deleted": True}
    assert (await rig.client.get(f"{PATH}/{sent['id']}")).status_code == 404
    assert (await rig.client.delete(f"{PATH}/{sent['id']}")).status_code == 404


async def test_pages_refuse_what_makes_no_sense(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path)
    sent = (await rig.post(PATH, asked())).json()
    at = f"{PATH}/{sent['id']}"
    for method, target, param in (
        ("GET", f"{at}/input_items?limit=0", "limit"),
        ("GET", f"{at}/input_items?order=up", "order"),
        ("GET", f"{at}?stream=true", "stream"),
        ("POST", f"{at}/cancel", None),
    ):
        response = await rig.client.request(method, target)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert (await rig.client.put(at)).status_code == 405


async def test_a_response_that_cannot_be_stored_is_no_success(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path)
    (tmp_path / "files").write_text("in the way")
    response = await rig.post(PATH, asked())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")
    names = [event["type"] for event in await stream(rig, PATH, asked())]
    assert names[-2:] == ["error", "response.failed"]
    assert "response.completed" not in names


async def test_a_failed_response_is_not_stored(rig: Rig, tmp_path: Path) -> None:
    worker = await started(rig, tmp_path)
    assert (await broken_stream(rig, worker, PATH, asked(), "Hel"))[-1]["type"] == "response.failed"
    assert not (tmp_path / "files").exists()


async def test_openais_client_reads_lists_and_deletes(rig: Rig, tmp_path: Path) -> None:
    await started(rig, tmp_path)
    async with openai.AsyncOpenAI(base_url=f"{rig.client.base_url}/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(model=MODEL, input="one", store=True)
        assert (await client.responses.retrieve(first.id)).output_text == "Hello"
        second = await client.responses.create(model=MODEL, input="two", store=True, previous_response_id=first.id)
        listed = [item async for item in client.responses.input_items.list(second.id, limit=1)]
        assert [item.type for item in listed] == ["message"] * 3
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
