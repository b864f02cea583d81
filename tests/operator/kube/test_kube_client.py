"""The client against a server that answers badly, late or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fake_kube_api import TOKEN, FakeKubeApi, Reply, cut, hang, refusal
from kubernetes.client.configuration import Configuration

from naru_operator.adapters.kube.caller import ClientSettings, pause_before_retry_s
from naru_operator.adapters.kube.client import KubeClient
from naru_operator.adapters.kube.errors import (
    AlreadyExists,
    ApiAway,
    Conflict,
    Denied,
    Forbidden,
    Gone,
    NotFound,
    Rejected,
)
from naru_operator.core.kube import Object, ObjectKey
from naru_proto.errors import InvalidRequest, NaruError

KEY = ObjectKey("apps", "w-0")
PODS = "/api/v1/namespaces/apps/pods"
POD = f"{PODS}/w-0"
EVENTS = "/apis/events.k8s.io/v1/namespaces/apps/events"
MODEL_STATUS = "/apis/serving.naru.dev/v1alpha1/namespaces/apps/modeldeployments/m/status"

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


@pytest.mark.parametrize("fault", [refusal(500, "InternalError", "etcd"), refusal(503, "", ""), Reply(502, raw="<p>")])
async def test_a_fault_of_the_server_is_tried_again(api: FakeKubeApi, client: KubeClient, fault: Reply) -> None:
    api.on("GET", POD, fault, fault, Reply(body=pod()))
    assert (await client.get("Pod", KEY))["metadata"]["name"] == "w-0"
    assert len(api.seen) == 3


async def test_a_cut_answer_is_tried_again(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", POD, cut, Reply(body=pod()))
    assert (await client.get("Pod", KEY))["metadata"]["name"] == "w-0"


async def test_a_throttled_request_waits_as_long_as_the_server_asks(
    api: FakeKubeApi, client: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def remember(pause_s: float, retry_after_s: float, share: float) -> float:
        waits.append(pause_before_retry_s(pause_s, retry_after_s, share))
        return 0.0

    monkeypatch.setattr("naru_operator.adapters.kube.caller.pause_before_retry_s", remember)
    api.on("GET", POD, refusal(429, "TooManyRequests", "slow down", Retry_After="7"), Reply(body=pod()))
    await client.get("Pod", KEY)
    assert waits == [7.0]


@pytest.mark.parametrize(
    ("pause_s", "retry_after_s", "share", "wanted_s"), [(1, 0, 0, 0.5), (1, 0, 1, 1.5), (1, 5, 1, 5), (8, 5, 0.5, 8)]
)
def test_pauses_vary_by_half_and_never_fall_below_what_is_asked(
    pause_s: float, retry_after_s: float, share: float, wanted_s: float
) -> None:
    assert pause_before_retry_s(pause_s, retry_after_s, share) == wanted_s


@pytest.mark.parametrize("asked", ["-3", "soon", "1e9", ""])
async def test_a_senseless_retry_after_neither_breaks_nor_blocks(
    api: FakeKubeApi, client: KubeClient, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def remember(pause_s: float, retry_after_s: float, share: float) -> float:
        waits.append(retry_after_s)
        return 0.0

    monkeypatch.setattr("naru_operator.adapters.kube.caller.pause_before_retry_s", remember)
    api.on("GET", POD, refusal(429, "", "", Retry_After=asked), Reply(body=pod()))
    await client.get("Pod", KEY)
    assert len(waits) == 1 and 0 <= waits[0] <= 30


async def test_a_server_that_stays_broken_is_given_up_with_a_retryable_error(
    api: FakeKubeApi, client: KubeClient
) -> None:
    api.on("GET", POD, refusal(500, "InternalError", "etcd is gone"))
    with pytest.raises(ApiAway, match=r"cannot get pods 'w-0' in namespace 'apps'.*500 etcd is gone") as caught:
        await client.get("Pod", KEY)
    assert caught.value.retryable
    assert len(api.seen) == 3


async def test_a_server_that_never_answers_is_given_up(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", POD, hang)
    with pytest.raises(ApiAway, match="does not answer"):
        await client.get("Pod", KEY)
    assert len(api.seen) == 3


async def test_nobody_listening_is_a_retryable_error(unused_tcp_port: int) -> None:
    client = KubeClient(Configuration(host=f"http://127.0.0.1:{unused_tcp_port}"), QUICK)
    with pytest.raises(ApiAway, match="does not answer"):
        await client.get("Pod", KEY)
    await client.close()


async def test_an_answer_that_is_no_object_is_no_success(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", POD, Reply(raw="<html>Sign in to the network</html>"))
    with pytest.raises(ApiAway, match="no JSON object"):
        await client.get("Pod", KEY)


async def test_a_hanging_request_does_not_hold_up_the_others(api: FakeKubeApi) -> None:
    client = KubeClient(api.configuration(), ClientSettings(num_threads=2, read_timeout_s=20, retry_pauses_s=()))
    released = asyncio.Event()

    async def slow(_seen: object, _request: object) -> Reply:
        await released.wait()
        return Reply(body=pod())

    api.on("GET", POD, slow)
    api.on("GET", f"{PODS}/other", Reply(body=pod()))
    first = asyncio.create_task(client.get("Pod", KEY))
    await api.wait_for("GET", POD)
    await client.get("Pod", ObjectKey("apps", "other"))
    assert not first.done()
    released.set()
    await first
    await client.close()


# --- refusals ---

RBAC = 'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in API group ""'


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (refusal(403, "Forbidden", RBAC), Forbidden, "cannot create pods.*check the operator's Role"),
        (refusal(403, "Forbidden", 'pods "w-0" is forbidden: exceeded quota: small'), Denied, "exceeded quota: small"),
        (refusal(403, "Forbidden", 'violates PodSecurity "restricted"'), Denied, "PodSecurity"),
        (refusal(401, "Unauthorized", "Unauthorized"), Forbidden, "check its token"),
        (refusal(409, "AlreadyExists", 'pods "w-0" already exists'), AlreadyExists, "already exists"),
        (refusal(409, "Conflict", "the object has been modified"), Conflict, "has been modified"),
        (refusal(404, "NotFound", 'namespaces "apps" not found'), NotFound, "not found"),
        (refusal(422, "Invalid", "spec.containers: Required value"), Rejected, "422|spec.containers: Required value"),
        (refusal(413, "RequestEntityTooLarge", "limit is 3145728"), Rejected, "limit is"),
        (Reply(418, raw="teapot"), Rejected, "the API server answered 418"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
async def test_refusals_become_errors_that_say_what_to_do(
    api: FakeKubeApi, client: KubeClient, reply: Reply, kind: type[NaruError], words: str
) -> None:
    api.on("POST", PODS, reply)
    with pytest.raises(kind, match=words) as caught:
        await client.create(pod())
    assert type(caught.value) is kind
    assert len(api.seen) == 1


async def test_messages_hold_neither_bodies_nor_tokens(api: FakeKubeApi, client: KubeClient) -> None:
    message = 'Pod "w-0" is invalid: spec.containers[0].env[0].value: Invalid value: "hush-hush": must be shorter'
    api.on("POST", PODS, refusal(422, "Invalid", message))
    with pytest.raises(Rejected) as caught:
        await client.create(pod())
    assert "env[0].value: Invalid value: must be shorter" in caught.value.message
    assert "hush-hush" not in caught.value.message and TOKEN not in caught.value.message
    assert api.seen[0].headers["Authorization"] == f"Bearer {TOKEN}"


async def test_an_object_without_namespace_is_refused_before_it_leaves(api: FakeKubeApi, client: KubeClient) -> None:
    with pytest.raises(InvalidRequest, match="names no namespace"):
        await client.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "w-0"}})
    assert api.seen == []


# --- reading ---


async def test_lists_are_read_page_by_page_and_items_know_their_kind(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", PODS + r"\?labelSelector=a=b&limit=2", page("a", "b", token="t1"))
    api.on("GET", PODS + r"\?continue=t1&labelSelector=a=b&limit=2", page("c", version="60"))
    listing = await client.list("Pod", "apps", "a=b", limit=2)
    assert [item["metadata"]["name"] for item in listing.items] == ["a", "b", "c"]
    assert listing.version == "50"  # the moment of the first page: nothing later is certain
    assert all(item["kind"] == "Pod" and item["apiVersion"] == "v1" for item in listing.items)
    assert not any("managedFields" in item["metadata"] for item in listing.items)


async def test_a_list_of_all_namespaces_asks_once(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", "/apis/apps/v1/controllerrevisions", page())
    assert (await client.list("ControllerRevision", None)).items == ()


async def test_a_list_whose_pages_expire_begins_anew(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", PODS + r"\?limit=500", page("a", token="old"), page("a2", token="new"))
    api.on("GET", PODS + r"\?continue=old&limit=500", refusal(410, "Expired", "The provided continue parameter is old"))
    api.on("GET", PODS + r"\?continue=new&limit=500", page("b2"))
    listing = await client.list("Pod", "apps")
    assert [item["metadata"]["name"] for item in listing.items] == ["a2", "b2"]


async def test_a_list_that_always_expires_is_given_up(api: FakeKubeApi, client: KubeClient) -> None:
    api.on("GET", PODS + r"\?limit=500", page("a", token="old"))
    api.on("GET", PODS + r"\?continue=old&limit=500", refusal(410, "Expired", "too old"))
    with pytest.raises(Gone):
        await client.list("Pod", "apps")
    assert len(api.seen) == 6


# --- writing ---
