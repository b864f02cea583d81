"""Tokenize and detokenize, and the state of each model in /v1/models."""

from __future__ import annotations

from typing import Any

import openai
from router_rig import MODEL, Rig, info
from stub_worker import fail
from task_worker import SCORER, tokenize

from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.model_state import model_card
from naru_router.core.route_map import RouteMap


async def serve(rig: Rig) -> None:
    await rig.publish_model()
    await rig.start_worker(script=tokenize)
    await rig.start_router()


async def test_a_text_becomes_tokens(rig: Rig) -> None:
    await serve(rig)
    reply = (await rig.post("/tokenize", {"model": MODEL, "prompt": "to be or"})).json()
    assert reply == {"count": 4, "max_model_len": 2048, "tokens": [1, 2, 2, 2], "token_strs": None}
    fields = {"add_special_tokens": False, "return_token_strs": True}
    reply = (await rig.post("/tokenize", {"model": MODEL, "prompt": "to be or", **fields})).json()
    assert reply == {"count": 3, "max_model_len": 2048, "tokens": [2, 2, 2], "token_strs": ["to", "be", "or"]}


async def test_a_chat_is_rendered_first_and_gets_no_special_tokens(rig: Rig) -> None:
    await serve(rig)
    messages = [{"role": "user", "content": "hi"}]
    reply = (await rig.post("/tokenize", {"model": MODEL, "messages": messages})).json()
    (request,) = rig.workers["w0"].requests
    assert request.tokenize.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not request.tokenize.add_special_tokens
    assert reply["count"] == len(request.tokenize.text.split())


async def test_tokens_become_a_text(rig: Rig) -> None:
    await serve(rig)
    assert (await rig.post("/detokenize", {"model": MODEL, "tokens": [1, 3]})).json() == {"prompt": "x xxx"}
    assert (await rig.post("/detokenize", {"model": MODEL, "tokens": []})).json() == {"prompt": ""}
    assert rig.workers["w0"].requests[1].tokenize.WhichOneof("from") == "token_ids"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 2**31]}, "tokens[1]"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
]


async def test_bad_fields_are_named(rig: Rig) -> None:
    await serve(rig)
    for path, fields, param in BAD:
        response = await rig.post(path, {"model": MODEL, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), fields
    assert rig.workers["w0"].requests == []


async def test_a_worker_that_names_its_own_field_has_the_requests_named(rig: Rig) -> None:
    await rig.publish_model()
    script = fail("invalid_request_error", "token_ids has 99; there are 50", param="token_ids")
    await rig.start_worker(script=script)
    await rig.start_router()
    error = (await rig.post("/detokenize", {"model": MODEL, "tokens": [99]})).json()["error"]
    assert (error["param"], error["message"]) == ("tokens", "tokens has 99; there are 50")


# --- the state of models --------------------------------------------------------------------------------------------

RECORD = ModelRecord("m", "file:///nowhere", 1, aliases=("small",), min_replicas=1, max_replicas=3, created_s=5)
FACTS = info()


def card(*copies: ResidentRecord, **fields: Any) -> dict[str, object]:
    workers = {f"w{i}": WorkerRecord(f"w{i}", "a:1", "e", {"m": copy}, **fields) for i, copy in enumerate(copies)}
    return model_card("m", RECORD, RouteMap(models={"m": RECORD}, workers=workers, infos={FACTS.digest(): FACTS}))


def test_a_card_tells_where_the_nearest_copy_stands() -> None:
    ready = ResidentRecord("ready", 1, FACTS.digest())
    loading = ResidentRecord("loading", 1, bytes_done=25, bytes_total=100, eta_s=4.0)
    farther = ResidentRecord("fetching", 1, bytes_done=1, bytes_total=100, eta_s=9.0)
    failed = ResidentRecord("failed", 1, error="no such file")
    state = ("state", "eta_s", "progress", "reason")
    for copies, wanted in (
        ((), ("cold", None, None, None)),
        ((ready, loading), ("ready", None, None, None)),
        ((failed, farther, loading), ("loading", 4.0, 0.25, None)),
        ((farther,), ("fetching", 9.0, 0.01, None)),
        ((failed,), ("failed", None, None, "w0: no such file")),
        ((ResidentRecord("host", 1), failed), ("host", None, None, None)),
        ((ResidentRecord("cold", 1),), ("cold", None, None, None)),
        ((ResidentRecord("something new", 1),), ("something new", None, None, None)),
    ):
        found = card(*copies)
        assert tuple(found[name] for name in state) == wanted
    assert card(ready, draining=True)["state"] == "draining"


def test_a_card_tells_what_is_known_of_the_model() -> None:
    found = card(ResidentRecord("ready", 1, FACTS.digest()))
    assert found["aliases"] == ["small"]
    assert found["copies"] == {"min": 1, "max": 3, "ready": 1}
    assert (found["tasks"], found["embedding_dim"], found["max_model_len"]) == (["generate"], None, 2048)
    assert (card()["tasks"], card()["embedding_dim"], card()["max_model_len"]) == (None, None, None)


async def test_the_openai_client_reads_the_models(rig: Rig) -> None:
    await rig.publish_model(aliases=("small",))
    await rig.publish_model("other", max_replicas=2)
    await rig.start_worker(facts=SCORER)
    await rig.start_router()
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{rig.app.http_port}/v1", api_key="none") as client:
        found = {card.id: card.model_dump() async for card in client.models.list()}
        assert {name: it["state"] for name, it in found.items()} == {MODEL: "ready", "small": "ready", "other": "cold"}
        assert found["small"]["root"] == MODEL
        assert found["small"]["tasks"] == ["score"]
        assert (await client.models.retrieve("other")).model_dump()["copies"] == {"min": 1, "max": 2, "ready": 0}
