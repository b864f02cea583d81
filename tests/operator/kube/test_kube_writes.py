"""Writes, events and permissions through the client, against an API server over HTTP that is told what to do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_kube_api import TOKEN, FakeKubeApi, Reply, cut, hang, refusal

from naru_operator.adapters.kube.caller import ClientSettings
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.connection import find_configuration
from naru_operator.adapters.kube.errors import (
    AlreadyExists,
    ApiAway,
    Conflict,
    NotFound,
    NotLeader,
)
from naru_operator.adapters.kube.kinds import LEASE
from naru_operator.core.kube import Object, ObjectEvent, ObjectKey
from naru_proto import names

KEY = ObjectKey("apps", "w-0")
PODS = "/api/v1/namespaces/apps/pods"
POD = f"{PODS}/w-0"
EVENTS = "/apis/events.k8s.io/v1/namespaces/apps/events"
MODEL_STATUS = "/apis/serving.naru.dev/v1alpha1/namespaces/apps/modeldeployments/m/status"

RBAC = 'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in API group ""'
QUICK = ClientSettings(num_threads=4, connect_timeout_s=2, read_timeout_s=0.3, retry_pauses_s=(0.0, 0.0))


@pytest.fixture
async def api() -> AsyncIterator[FakeKubeApi]:
    async with FakeKubeApi() as running:
        yield running


@pytest.fixture
async def client(api: FakeKubeApi) -> AsyncIterator[KubeClient]:
    made = KubeClient(api.configuration(), QUICK)
    yield made
    await made.close()


def pod(**metadata: object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "w-0", "namespace": "apps", **metadata},
        "spec": {"containers": [{"name": "worker", "env": [{"name": "KEY", "value": "hush-hush"}]}]},
    }


def page(*names_: str, token: str = "", version: str = "50") -> Reply:
    items = [{"metadata": {"name": name, "namespace": "apps", "managedFields": [{"manager": "x"}]}} for name in names_]
    return Reply(body={"kind": "PodList", "metadata": {"resourceVersion": version, "continue": token}, "items": items})


# --- transient faults ---


async def test_apply_takes_the_fields_and_ties_itself_to_no_version(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("PATCH", POD, Reply(body=pod(resourceVersion="8", managedFields=[{}])))
    answer = await client.apply({**pod(resourceVersion="7"), "status": {"phase": "Running"}})
    seen = api.seen[0]
    assert seen.headers["Content-Type"] == "application/apply-patch+yaml"
    assert seen.query == {"fieldManager": names.MANAGED_BY, "force": "true"}
    assert seen.body == pod()
    assert answer["metadata"]["resourceVersion"] == "8" and "managedFields" not in answer["metadata"]


async def test_a_status_is_applied_alone_and_to_that_very_object(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("PATCH", MODEL_STATUS, Reply(body={"metadata": {"uid": "u1"}}), Reply(body={"metadata": {"uid": "u2"}}))
    metadata = {"name": "m", "namespace": "apps", "uid": "u1", "labels": {"a": "b"}, "resourceVersion": "3"}
    told = {"kind": "ModelDeployment", "metadata": metadata, "spec": {"x": 1}, "status": {"phase": "Ready"}}
    await client.apply_status(told)
    with pytest.raises(Conflict, match="another object of that name"):
        await client.apply_status(told)
    assert api.seen[0].body == {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "m", "namespace": "apps", "uid": "u1"},
        "status": {"phase": "Ready"},
    }


async def test_a_create_whose_answer_was_lost_says_that_the_object_exists(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("POST", PODS, cut, refusal(409, "AlreadyExists", 'pods "w-0" already exists'))
    with pytest.raises(AlreadyExists):
        await client.create(pod())


async def test_deleting_names_the_object_meant(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("DELETE", POD, Reply(body=pod()))
    assert await client.delete("Pod", KEY, uid="u1", grace_s=5)
    assert api.seen[0].body["preconditions"] == {"uid": "u1"}
    assert api.seen[0].body["gracePeriodSeconds"] == 5


@pytest.mark.parametrize("reply", [refusal(404, "NotFound", "gone"), refusal(409, "Conflict", "uid mismatch")])
async def test_deleting_what_is_gone_is_fine(api: FakeKubeApi, client: KubeClient, reply: Reply) -> None:
    api.on("DELETE", POD, reply)
    assert not await client.delete("Pod", KEY, uid="u1")


async def test_a_write_over_an_old_version_is_tried_once(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("PUT", POD, refusal(500, "InternalError", "etcd"))
    with pytest.raises(ApiAway):
        await client.replace(pod(resourceVersion="7"))
    assert len(api.seen) == 1


WRITES: list[Callable[[KubeClient], object]] = [
    lambda client: client.create(pod()),
    lambda client: client.apply(pod()),
    lambda client: client.apply_status(pod(uid="u1")),
    lambda client: client.replace(pod()),
    lambda client: client.delete("Pod", KEY),
]


@pytest.mark.parametrize("write", WRITES, ids=("create", "apply", "apply_status", "replace", "delete"))
async def test_who_does_not_lead_writes_nothing(api: FakeKubeApi, write: Callable[[KubeClient], object]) -> None:
    client = KubeClient(api.configuration(), QUICK, may_write=lambda: False)
    with pytest.raises(NotLeader):
        await write(client)  # type: ignore[misc]
    assert api.seen == []
    api.on("GET", POD, Reply(body=pod()))
    await client.get("Pod", KEY)
    await client.close()


async def test_writes_that_wait_for_a_thread_are_held_back_when_the_lead_is_lost(api: FakeKubeApi) -> None:
    leads = True
    client = KubeClient(api.configuration(), ClientSettings(num_threads=1), may_write=lambda: leads)
    released = asyncio.Event()

    async def slow(_seen: object, _request: object) -> Reply:
        await released.wait()
        return Reply(body=pod())

    api.on("PATCH", PODS + ".*", slow)
    writes = [
        asyncio.create_task(client.apply({**pod(), "metadata": {"name": f"w-{number}", "namespace": "apps"}}))
        for number in range(5)
    ]
    await api.wait_for("PATCH", PODS + ".*")
    leads = False
    released.set()
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results[1:]] == [NotLeader] * 4
    assert len(api.seen) == 1
    await client.close()


async def test_answers_are_counted(api: FakeKubeApi) -> None:
    heard: list[tuple[str, str, int]] = []
    client = KubeClient(api.configuration(), QUICK, on_answer=lambda *answer: heard.append(answer))
    api.on("GET", POD, cut, refusal(404, "NotFound", "gone"))
    with pytest.raises(NotFound):
        await client.get("Pod", KEY)
    assert heard == [("get", "Pod", 0), ("get", "Pod", 404)]
    await client.close()


# --- events ---


def told(message: str = "pulled", reason: str = "Loaded") -> ObjectEvent:
    return ObjectEvent("Pod", KEY, reason, message)


async def test_the_same_event_is_sent_once(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("POST", EVENTS, Reply(201, {}))
    for event in (told(), told(), told("other"), told(), told("other")):
        await client.event(event, pod(uid="u1"))
    await client.event(told(), pod(uid="u2"))
    assert [(seen.body["note"], seen.body["regarding"]["uid"]) for seen in api.seen] == [
        ("pulled", "u1"),
        ("other", "u1"),
        ("pulled", "u2"),
    ]
    first = api.seen[0].body
    assert first["regarding"]["name"] == "w-0" and first["type"] == "Normal" and first["reason"] == "Loaded"


@pytest.mark.parametrize("fault", [refusal(403, "Forbidden", RBAC), refusal(500, "", ""), cut, hang])
async def test_an_event_that_cannot_be_sent_hurts_nobody_and_is_tried_next_time(
    api: FakeKubeApi, client: KubeClient, fault: Reply
) -> None:
    api.on("POST", EVENTS, fault, Reply(201, {}))
    await client.event(told(), pod(uid="u1"))
    await client.event(told(), pod(uid="u1"))
    await client.event(told(), pod(uid="u1"))
    assert len(api.seen) == 2


# --- credentials ---


async def test_a_kubeconfig_file_leads_to_the_server(api: FakeKubeApi, tmp_path: Path) -> None:
    client = KubeClient(find_configuration(str(api.kubeconfig(tmp_path))), QUICK)
    api.on("GET", POD, Reply(body=pod()))
    await client.get("Pod", KEY)
    assert re.fullmatch(f"[Bb]earer {TOKEN}", api.seen[0].headers["Authorization"])
    await client.close()


def test_no_credentials_at_all_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    with pytest.raises(ApiAway, match="service account, or set KUBECONFIG"):
        find_configuration()


async def test_a_review_tells_what_is_allowed(api: FakeKubeApi, client: KubeClient) -> None:
    review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    api.on("POST", review, Reply(201, {"status": {"allowed": False}}), refusal(403, "Forbidden", RBAC))
    assert await client.is_allowed("update", LEASE, "naru", name="naru-operator") is False
    assert await client.is_allowed("update", LEASE, "naru") is None
    asked = api.seen[0].body["spec"]["resourceAttributes"]
    assert (asked["verb"], asked["group"], asked["resource"], asked["namespace"], asked["name"]) == (
        "update",
        "coordination.k8s.io",
        "leases",
        "naru",
        "naru-operator",
    )
