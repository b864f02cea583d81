"""Informer and watch against a server that expires, hangs, refuses and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from fake_kube_api import TOKEN, FakeKubeApi, Handler, Reply, Seen, hang, listing, refusal, stream

from naru_operator.adapters.kube.caller import ClientSettings
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.informer import Informer
from naru_operator.adapters.kube.kinds import POD, WATCHED
from naru_operator.adapters.kube.kopf_setup import WatchSettings
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import ObjectKey

MODELS = "/apis/serving.naru.dev/v1alpha1/namespaces/apps/modeldeployments"
PODS = "/api/v1/namespaces/apps/pods"
WATCH_MODELS = MODELS + r"\?.*watch=true"
WATCH_PODS = PODS + r"\?.*watch=true"

QUICK = WatchSettings(inactivity_s=0.5, connect_timeout_s=2, request_timeout_s=2, error_pauses_s=(0.05, 0.05))
PATIENT = WatchSettings(inactivity_s=60, error_pauses_s=(0.05, 0.05))


EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}


def model(name: str, version: int, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "apps", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "serving.naru.dev/v1alpha1", "kind": "ModelDeployment", "metadata": metadata, **fields}


def event(kind: str, obj: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": obj}


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    """A server with all kinds, nothing in them, and silent watches."""
    async with FakeKubeApi() as running:
        running.discover()
        for kind in WATCHED:
            running.on("GET", kind.path("apps"), listing())
            running.on("GET", kind.path("apps") + r"\?.*watch=true.*", stream())
        yield running


@contextlib.asynccontextmanager
async def informed(
    api: FakeKubeApi, settings: WatchSettings = PATIENT, *, resync_s: float = 3600
) -> AsyncIterator[tuple[ObjectStore, Informer]]:
    client = KubeClient(api.configuration(), ClientSettings(num_threads=2, retry_pauses_s=()))
    store = ObjectStore(("apps",))
    informer = Informer(client, api.configuration(), store, resync_s=resync_s, watch_settings=settings)
    task = asyncio.create_task(informer.run())
    try:
        yield store, informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def until(store: ObjectStore, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            store.changed.clear()
            if condition():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.changed.wait()


def names(store: ObjectStore) -> set[str]:
    return {key.name for key in store.objects("ModelDeployment")}


async def test_a_watch_tells_of_what_comes_changes_and_goes(api: FakeKubeApi) -> None:
    api.on("GET", MODELS, listing(model("old", 5), model("gone", 6)))
    api.on(
        "GET",
        WATCH_MODELS + ".*",
        stream(
            event("ADDED", model("new", 11)),
            event("MODIFIED", model("old", 12, spec={"x": 1})),
            event("DELETED", model("gone", 13)),
        ),
    )
    async with informed(api) as (store, informer):
        await until(store, lambda: names(store) == {"old", "new"})
        assert store.objects("ModelDeployment")[ObjectKey("apps", "old")]["spec"] == {"x": 1}
        assert store.is_synced and informer.trouble == ""


async def test_only_our_pods_are_asked_for(api: FakeKubeApi) -> None:
    async with informed(api):
        watches = await api.wait_for("GET", WATCH_PODS + ".*")
    ours = "app.kubernetes.io/managed-by=naru-operator"
    assert watches[0].query["labelSelector"] == ours
    assert all(seen.query["labelSelector"] == ours for seen in api.requests("GET", POD.path("apps")))


async def test_neither_crds_nor_namespaces_are_read_and_nothing_is_written(api: FakeKubeApi) -> None:
    async with informed(api):
        for kind in WATCHED:
            await api.wait_for("GET", kind.path("apps") + r"\?.*watch=true.*")
    assert {seen.method for seen in api.seen} == {"GET"}
    listed = {kind.path("apps") for kind in WATCHED}
    others = {seen.path for seen in api.seen} - listed
    assert not [path for path in others if "customresourcedefinitions" in path or path.endswith("/namespaces")]


async def test_a_stream_that_went_silent_is_opened_anew(api: FakeKubeApi) -> None:
    api.on("GET", WATCH_MODELS + ".*", stream(), stream(event("ADDED", model("late", 20))), stream())
    async with informed(api, QUICK) as (store, _):
        await until(store, lambda: names(store) == {"late"})


async def test_a_watch_request_that_is_never_answered_is_made_anew(api: FakeKubeApi) -> None:
    api.on("GET", WATCH_MODELS + ".*", hang, stream(event("ADDED", model("late", 20))), stream())
    async with informed(api, QUICK) as (store, _):
        await until(store, lambda: names(store) == {"late"})


async def test_a_stream_goes_on_from_where_it_ended(api: FakeKubeApi) -> None:
    bookmark = {"kind": "ModelDeployment", "metadata": {"resourceVersion": "40"}}
    ended = stream(event("ADDED", model("x", 30)), event("BOOKMARK", bookmark), is_open=False)
    api.on("GET", WATCH_MODELS + ".*", ended, stream())
    async with informed(api):
        watches = await api.wait_for("GET", WATCH_MODELS + ".*", 2)
    assert [seen.query["resourceVersion"] for seen in watches[:2]] == ["10", "40"]


async def test_an_expired_position_is_healed_by_a_list(api: FakeKubeApi) -> None:
    api.on("GET", MODELS, listing(), listing(), listing(), listing(model("missed", 15), version="20"))
    api.on("GET", WATCH_MODELS + ".*", stream(EXPIRED, is_open=False), stream())
    async with informed(api) as (store, _):
        await until(store, lambda: names(store) == {"missed"})


async def test_deletions_that_an_expired_position_hides_are_found(api: FakeKubeApi) -> None:
    expire = asyncio.Event()

    async def watched(seen: Seen, request: web.Request) -> Reply | web.StreamResponse:
        await expire.wait()
        api.on("GET", MODELS, listing(version="30"))
        api.on("GET", WATCH_MODELS + ".*", stream())
        return await stream(EXPIRED, is_open=False)(seen, request)

    api.on("GET", MODELS, listing(model("gone", 5)))
    api.on("GET", WATCH_MODELS + ".*", watched)
    async with informed(api) as (store, _):
        await until(store, lambda: names(store) == {"gone"})
        await api.wait_for("GET", PODS, 3)  # the list after the first streams
        expire.set()
        await until(store, lambda: names(store) == set())


@pytest.mark.parametrize(
    "fault",
    [
        {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError"}},
        {"type": "ADDED", "object": {"kind": "ModelDeployment"}},
    ],
    ids=("error in the stream", "object without metadata"),
)
async def test_whatever_ends_the_watch_it_begins_again_and_what_it_missed_is_found(
    api: FakeKubeApi, fault: dict[str, Any]
) -> None:
    lists: list[Reply | Handler] = [listing(model("deleted", 3))] * 2
    api.on("GET", MODELS, *lists, listing(model("new", 15), version="20"))
    api.on("GET", WATCH_MODELS + ".*", stream(fault), stream())
    async with informed(api) as (store, _):
        await until(store, lambda: names(store) == {"new"})


async def test_nothing_is_synced_before_all_is_listed(api: FakeKubeApi) -> None:
    released = asyncio.Event()

    async def slow(_seen: object, _request: object) -> Reply:
        await released.wait()
        return listing()

    api.on("GET", PODS, slow)
    api.on("GET", MODELS, listing(model("x", 5)))
    async with informed(api) as (store, informer):
        await until(store, lambda: names(store) == {"x"})
        assert not store.is_synced and informer.trouble
        released.set()
        await until(store, lambda: store.is_synced)


async def test_missing_kinds_are_told_and_found_when_they_come(api: FakeKubeApi) -> None:
    missing = refusal(404, "NotFound", "the server could not find the requested resource")
    api.on("GET", MODELS, missing, missing, listing(model("x", 5)))
    async with informed(api) as (store, informer):
        await until(store, lambda: "crds/" in informer.trouble)
        assert not store.is_synced
        await until(store, lambda: store.is_synced)
        await api.wait_for("GET", WATCH_MODELS + ".*")
        assert names(store) == {"x"}


async def test_a_missing_permission_is_told_with_the_remedy(api: FakeKubeApi, caplog: pytest.LogCaptureFixture) -> None:
    words = 'pods is forbidden: User "x" cannot list resource "pods" in API group "" in the namespace "apps"'
    api.on("GET", PODS, refusal(403, "Forbidden", words))
    async with informed(api) as (store, informer):
        await until(store, lambda: "cannot list pods in namespace 'apps'" in informer.trouble)
        await api.wait_for("GET", PODS, 3)
        assert "Role" in informer.trouble and not store.is_synced
    told = [record for record in caplog.records if "cannot be listed" in record.getMessage()]
    assert len(told) == 1  # not at each attempt


async def test_a_resync_finds_what_no_watch_told(api: FakeKubeApi) -> None:
    api.on("GET", MODELS, listing(model("gone", 5)))
    async with informed(api) as (store, informer):
        await api.wait_for("GET", WATCH_MODELS + ".*")
        await until(store, lambda: names(store) == {"gone"})
        api.on("GET", MODELS, listing(model("new", 15), version="20"))
        api.on("GET", WATCH_MODELS + ".*", stream())
        await informer.resync()
        assert names(store) == {"new"}


async def test_lists_come_by_themselves(api: FakeKubeApi) -> None:
    api.on("GET", MODELS, listing(), listing(), listing(model("drift", 15), version="20"))
    async with informed(api, resync_s=0.2) as (store, _):
        await until(store, lambda: names(store) == {"drift"})


async def test_the_process_keeps_its_signals_its_tasks_and_its_logs(
    api: FakeKubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    handler = signal.getsignal(signal.SIGTERM)
    level, propagate = logging.getLogger("kopf").level, logging.getLogger("kopf").propagate
    bystander = asyncio.create_task(asyncio.Event().wait())
    caplog.set_level(logging.INFO)
    api.on("GET", WATCH_MODELS + ".*", stream(*(event("ADDED", model(f"m{n}", 20 + n)) for n in range(50))))
    async with informed(api) as (store, _):
        await until(store, lambda: len(names(store)) == 50)
        assert signal.getsignal(signal.SIGTERM) is handler
    assert not bystander.done()
    bystander.cancel()
    loop.remove_signal_handler(signal.SIGTERM)
    assert (logging.getLogger("kopf").level, logging.getLogger("kopf").propagate) == (level, propagate)
    assert len(caplog.records) < 5, [record.getMessage() for record in caplog.records]


async def test_refused_credentials_end_in_patience_not_in_a_storm(
    api: FakeKubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the token is refused, nothing works; when it is good again, all does."""
    refused = refusal(401, "Unauthorized", "Unauthorized")
    api.on("GET", WATCH_MODELS + ".*", refused, refused, refused, stream(event("ADDED", model("late", 20))), stream())
    async with informed(api) as (store, _):
        await until(store, lambda: names(store) == {"late"})
    assert len(api.requests("GET", WATCH_MODELS + ".*")) < 8
    assert any("refuses the operator's credentials" in record.getMessage() for record in caplog.records)
    assert TOKEN not in caplog.text
