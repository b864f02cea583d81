"""Names of models: exactly those of the registry, whatever is in them; what nobody has named leaves no trace."""

from __future__ import annotations

import asyncio
import gc
import json
from urllib.parse import quote

import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple

ODD = ["org/Name-1.0", "a:b", "UPPER", "dotted.name", "org/deep/name:tag"]
NUM_UNKNOWN = 5000
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


async def odd_models(rig: Rig) -> None:
    for name in ODD:
        await rig.publish_model(name)
    await rig.start_worker(models=tuple(ODD))
    await rig.start_router()


async def test_a_name_is_found_as_it_stands_and_in_no_other_spelling(rig: Rig) -> None:
    await odd_models(rig)
    for name in ODD:
        for spelled in (name, quote(name, safe="")):
            card = await rig.client.get(f"/v1/models/{spelled}")
            assert card.status_code == 200 and card.json()["id"] == name
        for path in (CHAT, COMPLETION):
            reply = await rig.post(path, {**body(path), "model": name})
            assert reply.status_code == 200 and reply.json()["model"] == name
        for other in (name.swapcase(), f"{name} ", f" {name}", f"{name}\n", f"{name}/", name[:-1], f"{name}\x00"):
            missing = await rig.post(CHAT, {**body(CHAT), "model": other})
            assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found", other
            assert missing.json()["error"]["param"] == "model"
            assert (await rig.client.get(f"/v1/models/{quote(other, safe='')}")).status_code == 404
    assert [model for model in {r.model for r in rig.workers["w0"].requests} if model not in ODD] == []


@BOTH
async def test_a_name_of_ten_kilobytes_is_refused_in_few_words(rig: Rig, path: str) -> None:
    worker = await simple(rig)
    for name in ("x" * 10_000, "é" * 10_000, "/" * 10_000):
        reply = await rig.post(path, {**body(path), "model": name})
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"
        assert len(reply.json()["error"]["message"]) < 1000
    assert worker.requests == []
    assert (await rig.client.get("/v1/models/" + "y" * 10_000)).status_code in (404, 414, 431)


async def test_a_call_that_names_no_model_is_told_so(rig: Rig) -> None:
    await simple(rig)
    for path in (CHAT, COMPLETION):
        sent = body(path)
        del sent["model"]
        reply = await rig.post(path, sent)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "model"


async def test_models_that_nobody_holds_are_listed_and_say_so(rig: Rig) -> None:
    await rig.publish_model("asleep", on_demand=True, min_replicas=0)
    await rig.publish_model("org/asleep:2", on_demand=True, min_replicas=0, aliases=("nap",))
    await simple(rig)
    listed = {card["id"]: card["ready_workers"] for card in (await rig.client.get("/v1/models")).json()["data"]}
    assert listed == {"asleep": 0, "org/asleep:2": 0, "nap": 0, MODEL: 1}
    assert (await rig.client.get("/v1/models/org/asleep:2")).json()["ready_workers"] == 0


async def _pipelined(rig: Rig, names: list[str]) -> bytes:
    """Asks for all of them on one connection, as fast as it goes; the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.app.http_port, limit=2**24)
    for number, name in enumerate(names):
        content = json.dumps({**body(COMPLETION), "model": name}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        last = "connection: close\r\n" if number == len(names) - 1 else ""
        writer.write(f"{head}{last}\r\n".encode() + content)
    answers = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answers


async def test_thousands_of_names_that_nobody_has_leave_nothing_behind(rig: Rig) -> None:
    worker = await simple(rig, num_traces=10_000)
    await rig.post(COMPLETION, {**body(COMPLETION), "model": "junk-first"})
    series = {line.split(" ")[0] for line in (await rig.client.get("/metrics")).text.splitlines()}
    keys = set(await rig.board.keys("*"))
    gc.collect()
    num_objects = len(gc.get_objects())
    answers = await _pipelined(rig, [f"junk-{number}" for number in range(NUM_UNKNOWN)])
    assert answers.count(b"HTTP/1.1 404 ") == NUM_UNKNOWN and answers.count(b"model_not_found") == NUM_UNKNOWN
    text = (await rig.client.get("/metrics")).text
    assert {line.split(" ")[0] for line in text.splitlines()} == series and "junk" not in text
    assert {key for key in await rig.board.keys("*") if b"junk" in key} == set()
    # What routers and keeper write for themselves comes and goes.
    assert len(set(await rig.board.keys("*")) - keys) <= 3
    gc.collect()
    assert len(gc.get_objects()) - num_objects < NUM_UNKNOWN / 10 and worker.requests == []
    assert (await rig.client.get("/v1/naru/placement?model=junk-1")).status_code == 404
