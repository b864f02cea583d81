"""What the placement pages answer: copies, the next place, dry runs, bad bodies, and what a tenant may not see."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from naru_proto.errors import Unauthenticated, Unavailable
from naru_proto.registry import FootprintRecord, LeaseRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.http.explain import MAX_MANIFEST_BYTES, PlacementPages
from naru_router.adapters.keeper.loop import KeeperLoop
from naru_router.adapters.keeper.sight import Sight
from naru_router.adapters.leases import Leases
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.route_map import RouteMap

MB = 1_000_000
PATH = "/v1/naru/placement"
RED = {"x-tenant": "red"}
"""The one tenant that may use every model."""


def worker(worker_id: str, used: int, **models: ResidentRecord) -> WorkerRecord:
    return WorkerRecord(
        worker_id, f"{worker_id}:1", "e", models, pool="gpu", node=f"node-{worker_id}", budget_bytes=100 * MB,
        used_bytes=used * MB,
    )  # fmt: skip


def resident(size: int, **more: Any) -> ResidentRecord:
    return ResidentRecord("ready", 1, weight_bytes=size * MB, **more)


MAP = RouteMap(
    {
        "chat": ModelRecord("chat", "hf://o/chat", 1, target="chat@1", aliases=("c",), max_replicas=3),
        "chat@1": ModelRecord("chat@1", "hf://o/chat", 1, is_revision=True, max_replicas=3),
        "secret": ModelRecord("secret", "hf://o/secret", 1, on_demand=True, policy="on_demand", allow=("red",)),
    },
    {
        "w0": worker("w0", 60, **{"chat@1": resident(60, num_in_flight=2)}),
        "w1": worker("w1", 50, secret=resident(50)),
    },
    footprints={"chat@1": FootprintRecord(55 * MB, 5 * MB), "secret": FootprintRecord(50 * MB, 0)},
)


class NoWorkers:
    """Nobody to move."""

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        raise Unavailable("none")


class NoLeases:
    """Redis is away."""

    async def take(self, key: str, ttl_s: float, worker_id: str = "") -> LeaseRecord | None:
        raise Unavailable("away")


class NoMetrics:
    def set_keeper(self, is_keeper: bool) -> None:
        pass

    def count_move(self, direction: str, reason: str, outcome: str) -> None:
        pass


def caller_of(header: Callable[[str], str | None]) -> Caller:
    tenant = header("x-tenant") or ""
    if tenant == "nobody":
        raise Unauthenticated("no such key")
    return Caller(tenant) if tenant else ANYONE


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    sight = Sight(lambda: MAP, lambda worker_id, model: worker_pb2.ModelLoad(num_running=1, num_waiting=3))
    loop = KeeperLoop(Keeper(), sight, NoWorkers(), cast(Leases, NoLeases()), NoMetrics(), clock=lambda: 100.0)
    await loop.tick()
    pages = PlacementPages(loop, lambda: MAP, caller_of)
    app = Starlette(routes=[Route(PATH, pages.placement), Route(PATH, pages.dry_run, methods=["POST"])])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as made:
        yield made


def manifest(name: str = "new", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "hf://o/new"}, **spec},
    }


async def dry_run(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    reply = await client.post(PATH, json=body, headers=RED)
    assert reply.status_code == 200, reply.text
    page: dict[str, Any] = reply.json()
    return page


async def test_one_model_says_where_it_is_and_where_a_copy_more_would_come_up(client: httpx.AsyncClient) -> None:
    page = (await client.get(PATH, params={"model": "c"}, headers=RED)).json()
    (model,) = page["models"]
    assert (model["model"], model["held_as"], model["max_replicas"], model["copy_bytes"]) == (
        "chat", "chat@1", 3, 60 * MB,
    )  # fmt: skip
    (copy,) = model["copies"]
    assert (copy["worker"], copy["state"], copy["num_in_flight"]) == ("w0", "ready", 4)
    assert model["reasons"][0] == "1 copies up; at least 1, at most 3"
    assert (model["next"]["worker"], page["is_keeper"]) == ("w1", False)
    assert [(w["worker"], w["free_bytes"], w["models"]) for w in page["workers"]] == [
        ("w0", 40 * MB, ["chat@1"]),
        ("w1", 50 * MB, ["secret"]),
    ]


async def test_all_models_are_shown_where_none_is_named(client: httpx.AsyncClient) -> None:
    page = (await client.get(PATH, headers=RED)).json()
    assert [model["model"] for model in page["models"]] == ["chat", "secret"]


async def test_an_unknown_model_and_an_unknown_key_are_refused(client: httpx.AsyncClient) -> None:
    reply = await client.get(PATH, params={"model": "nope"})
    assert reply.status_code == 404 and "chat" in reply.json()["error"]["message"]
    assert (await client.get(PATH, headers={"x-tenant": "nobody"})).status_code == 401
    assert (await client.post(PATH, json={}, headers={"x-tenant": "nobody"})).status_code == 401


async def test_a_tenant_sees_no_name_of_a_model_that_it_may_not_use(client: httpx.AsyncClient) -> None:
    for reply in (
        await client.get(PATH, headers={"x-tenant": "blue"}),
        await client.get(PATH, params={"model": "secret"}, headers={"x-tenant": "blue"}),
        await client.post(PATH, json={"manifest": manifest(), "num_bytes": 90 * MB}, headers={"x-tenant": "blue"}),
    ):
        assert "'secret'" not in reply.text.replace("the model 'secret' does not exist", "")
        assert '"secret"' not in reply.text
    page = (await client.get(PATH, headers={"x-tenant": "blue"})).json()
    assert [model["model"] for model in page["models"]] == ["chat"]


async def test_a_dry_run_says_where_a_model_fits(client: httpx.AsyncClient) -> None:
    page = await dry_run(client, manifest=manifest(), num_bytes=45 * MB)
    assert [copy["worker"] for copy in page["copies"]] == ["w1"] and page["unplaced"] is None
    assert "45.0 MB" in page["copies"][0]["reasons"][0] and page["copies"][0]["victims"] == []


async def test_a_dry_run_says_who_would_leave(client: httpx.AsyncClient) -> None:
    # The frames say that `secret` is busy; the lease says that it is idle, which is what placement goes by.
    page = await dry_run(client, manifest=manifest(), num_bytes=90 * MB)
    assert [(copy["worker"], copy["victims"]) for copy in page["copies"]] == [("w1", ["secret"])]


async def test_a_dry_run_says_in_numbers_why_a_model_fits_nowhere(client: httpx.AsyncClient) -> None:
    page = await dry_run(client, manifest=manifest(replicas={"min": 2}), num_bytes=120 * MB)
    assert page["copies"] == [] and page["unplaced"]["num_missing"] == 2
    assert "120.0 MB" in page["unplaced"]["reason"] and "100.0 MB" in page["unplaced"]["reason"]


async def test_a_dry_run_in_a_pool_without_workers_says_so(client: httpx.AsyncClient) -> None:
    page = await dry_run(client, manifest=manifest(), num_bytes=MB, pools=["none"])
    assert "there is no worker" in page["unplaced"]["reason"]


async def test_a_dry_run_takes_the_size_of_a_model_with_the_same_files(client: httpx.AsyncClient) -> None:
    page = await dry_run(client, manifest=manifest("other", model={"uri": "hf://o/chat"}))
    assert page["copy_bytes"] == 60 * MB and any("'chat@1'" in note for note in page["notes"])


async def test_a_dry_run_on_demand_says_where_the_first_request_brings_it_up(client: httpx.AsyncClient) -> None:
    page = await dry_run(client, manifest=manifest(residency={"policy": "OnDemand"}), num_bytes=45 * MB)
    assert [copy["worker"] for copy in page["copies"]] == ["w1"]
    assert any("on demand" in note for note in page["notes"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        json.dumps({"manifest": 5}).encode(),
        json.dumps({"manifest": {"kind": "WorkerPool"}}).encode(),
        json.dumps({"manifest": manifest(), "num_bytes": -1}).encode(),
        json.dumps({"manifest": manifest(), "num_bytes": True}).encode(),
        json.dumps({"manifest": manifest(), "num_bytes": 10**30}).encode(),
        json.dumps({"manifest": manifest(), "pools": "gpu"}).encode(),
        json.dumps({"manifest": manifest(), "pools": [1]}).encode(),
        json.dumps({"manifest": manifest(), "more": 1}).encode(),
        json.dumps({"manifest": manifest(replicas={"min": -1})}).encode(),
        json.dumps(
            {"manifest": {"apiVersion": "v1", "kind": "List", "items": [manifest("a"), manifest("b")]}}
        ).encode(),
        b'{"manifest": "' + b"x" * MAX_MANIFEST_BYTES + b'"}',
    ],
)
async def test_bodies_that_are_wrong_are_refused_in_a_sentence(client: httpx.AsyncClient, body: bytes) -> None:
    reply = await client.post(PATH, content=body)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


async def test_the_command_reads_what_the_router_writes(client: httpx.AsyncClient) -> None:
    from naru_operator.cli.explain_placement import render, render_dry_run

    text = render((await client.get(PATH, headers=RED)).json())
    assert "chat: preferred, 1 to 3 copies" in text and "secret: on_demand" in text
    page = await dry_run(client, manifest=manifest(replicas={"min": 2}), num_bytes=45 * MB)
    assert "new: 2 copies" in render_dry_run(page) and "1 of 2 fit nowhere" in render_dry_run(page)
