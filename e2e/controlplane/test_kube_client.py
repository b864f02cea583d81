"""The operator's client, informer and election against a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from naru_cluster.api import KubeCluster

from naru_operator.adapters.kube.client import ClientSettings, KubeClient
from naru_operator.adapters.kube.connection import find_configuration
from naru_operator.adapters.kube.election import Election, election_client_settings
from naru_operator.adapters.kube.errors import AlreadyExists, Conflict, Denied, Forbidden, NotFound, Rejected
from naru_operator.adapters.kube.informer import Informer
from naru_operator.adapters.kube.kinds import WATCHED
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.core.kube import Object, ObjectEvent, ObjectKey, key_of, owner_reference
from naru_operator.core.leadership import Timing
from naru_proto import names

pytestmark = pytest.mark.timeout(180)

OURS = {names.LABEL_MANAGED_BY: names.MANAGED_BY}


@pytest.fixture
async def client(crds: KubeCluster) -> AsyncIterator[KubeClient]:
    """As admin."""
    made = KubeClient(find_configuration(str(crds.kubeconfig)))
    yield made
    await made.close()


def model(namespace: str, name: str = "m", **fields: Any) -> Object:
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "ModelDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "hf://acme/tiny"}},
        **fields,
    }


def pod(namespace: str, name: str = "w-0", **security: object) -> Object:
    container = {"name": "worker", "image": "none", "securityContext": security}
    metadata = {"name": name, "namespace": namespace, "labels": OURS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def revision(namespace: str, name: str, owner: Object) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": OURS, "ownerReferences": [owner_reference(owner)]}
    return {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": metadata, "revision": 1, "data": {}}


# --- reading and writing ---


async def test_an_object_is_created_once_applied_and_deleted_by_its_uid(client: KubeClient, namespace: str) -> None:
    made = await client.create(model(namespace))
    key, uid = key_of(made), made["metadata"]["uid"]
    assert "managedFields" not in made["metadata"]
    with pytest.raises(AlreadyExists):
        await client.create(model(namespace))
    child = await client.create(revision(namespace, "m-1", made))
    assert (await client.get("ControllerRevision", key_of(child)))["metadata"]["ownerReferences"][0]["uid"] == uid
    assert not await client.delete("ModelDeployment", key, uid="11111111-2222-3333-4444-555555555555")
    assert await client.delete("ModelDeployment", key, uid=uid)
    assert not await client.delete("ModelDeployment", key, uid=uid)
    with pytest.raises(NotFound):
        await client.get("ModelDeployment", key)


async def test_a_status_is_written_once_and_only_to_the_object_meant(client: KubeClient, namespace: str) -> None:
    made = await client.create(model(namespace))
    told = {**made, "status": {"phase": "Pending", "observedGeneration": 1}}
    first = await client.apply_status(told)
    assert first["status"]["phase"] == "Pending" and first["spec"] == made["spec"]
    again = await client.apply_status(told)
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    less = await client.apply_status({**made, "status": {"phase": "Pending"}})
    assert "observedGeneration" not in less["status"]  # what is not told any more is taken back
    other = {**told, "metadata": {**made["metadata"], "uid": "11111111-2222-3333-4444-555555555555"}}
    with pytest.raises(Conflict):
        await client.apply_status(other)
    with pytest.raises(NotFound):
        await client.apply_status(model(namespace, "absent", status={"phase": "Ready"}))


async def test_an_apply_keeps_what_others_wrote_elsewhere(
    client: KubeClient, crds: KubeCluster, namespace: str
) -> None:
    await client.apply(pod(namespace))
    crds.kubectl("annotate", "pod", "w-0", "--namespace", namespace, "team=blue")
    applied = await client.apply(pod(namespace))
    assert applied["metadata"]["annotations"]["team"] == "blue"


async def test_refusals_say_what_is_wrong_without_the_values(client: KubeClient, namespace: str) -> None:
    wrong = model(namespace)
    wrong["spec"] = {"model": {"uri": "nonsense-with-secret-xyz"}}
    with pytest.raises(Rejected, match=r"spec\.model\.uri") as caught:
        await client.create(wrong)
    assert "secret-xyz" not in caught.value.message


async def test_admission_is_told_apart_from_missing_permissions(
    client: KubeClient, crds: KubeCluster, namespace: str
) -> None:
    crds.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(Denied, match="PodSecurity"):
        await client.create(pod(namespace, privileged=True))


async def test_lists_come_in_pages_and_by_label(client: KubeClient, namespace: str) -> None:
    owner = await client.create(model(namespace))
    await asyncio.gather(*(client.create(revision(namespace, f"r-{number:02}", owner)) for number in range(25)))
    stranger = revision(namespace, "stranger", owner)
    stranger["metadata"]["labels"] = {}
    await client.create(stranger)
    selector = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    listing = await client.list("ControllerRevision", namespace, selector, limit=4)
    assert [item["metadata"]["name"] for item in listing.items] == [f"r-{number:02}" for number in range(25)]
    assert int(listing.version) > 0


async def test_an_event_is_seen_by_kubectl(client: KubeClient, crds: KubeCluster, namespace: str) -> None:
    made = await client.create(model(namespace))
    event = ObjectEvent("ModelDeployment", key_of(made), "WeightsMissing", "no such file: " + "ä" * 2000, True)
    await client.event(event, made)
    await client.event(event, made)
    events = crds.kubectl_json("get", "events", "--namespace", namespace)["items"]
    (seen,) = [item for item in events if item["reason"] == "WeightsMissing"]
    assert seen["type"] == "Warning" and seen["involvedObject"]["uid"] == made["metadata"]["uid"]
    assert seen["message"].startswith("no such file: ää")


async def test_many_writes_at_once_all_arrive(client: KubeClient, namespace: str) -> None:
    made = await asyncio.gather(*(client.create(model(namespace, f"m-{number}")) for number in range(60)))
    for phase in ("Pending", "Ready"):
        await asyncio.gather(*(client.apply_status({**obj, "status": {"phase": phase}}) for obj in made))
    listing = await client.list("ModelDeployment", namespace)
    assert [item["status"]["phase"] for item in listing.items] == ["Ready"] * 60


# --- permissions ---


@pytest.fixture
def account(crds: KubeCluster, namespace: str, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Path]:
    """Makes a kubeconfig of a service account with these rules in the namespace, and no others."""

    def make(rules: list[dict[str, Any]]) -> Path:
        rbac = "rbac.authorization.k8s.io"
        named = {"name": "narrow", "namespace": namespace}
        subject = {"kind": "ServiceAccount", **named}
        crds.apply(
            [
                {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
                {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": named, "rules": rules},
                {
                    "apiVersion": f"{rbac}/v1",
                    "kind": "RoleBinding",
                    "metadata": named,
                    "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "narrow"},
                    "subjects": [subject],
                },
            ]
        )
        token = crds.kubectl("create", "token", "narrow", "--namespace", namespace).strip()
        config = yaml.safe_load(crds.kubeconfig.read_text())
        config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
        path = tmp_path / "narrow.kubeconfig"
        path.write_text(json.dumps(config))
        return path

    return make


READ_RULES = [
    {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["list", "watch"]}
    for kind in WATCHED
]  # fmt: skip
LEASE_RULES = [
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [names.LEASE_OPERATOR],
        "verbs": ["get", "update"],
    },
]


async def test_a_missing_permission_is_named_with_the_remedy(
    account: Callable[[list[dict[str, Any]]], Path], namespace: str
) -> None:
    client = KubeClient(find_configuration(str(account([]))))
    with pytest.raises(Forbidden, match=r"cannot list pods in namespace .*: the permission is missing.*Role"):
        await client.list("Pod", namespace)
    with pytest.raises(Forbidden, match="permission to get, create, update leases"):
        async with Election(client, namespace, "one"):
            raise AssertionError("it must not start")
    await client.close()


async def test_a_role_for_one_lease_is_enough_to_lead(
    account: Callable[[list[dict[str, Any]]], Path], namespace: str
) -> None:
    client = KubeClient(find_configuration(str(account(LEASE_RULES))), election_client_settings(Timing()))
    async with asyncio.timeout(60), Election(client, namespace, "one") as election:
        await election.wait_leading()
    await client.close()


async def test_listing_and_watching_the_five_kinds_is_all_the_informer_needs(
    account: Callable[[list[dict[str, Any]]], Path], client: KubeClient, namespace: str
) -> None:
    async with informed(account(READ_RULES), namespace) as (store, informer):
        await until(lambda: store.is_synced)
        await client.create(model(namespace))
        await client.create(pod(namespace))
        await until(lambda: len(store.objects("ModelDeployment")) == 1 and len(store.objects("Pod")) == 1)
        assert informer.trouble == ""


# --- watching ---


@contextlib.asynccontextmanager
async def informed(kubeconfig: Path, namespace: str) -> AsyncIterator[tuple[ObjectStore, Informer]]:
    """An informer that lists once, so that all later news come by the watch."""
    configuration = find_configuration(str(kubeconfig))
    client = KubeClient(configuration, ClientSettings(num_threads=2))
    store = ObjectStore((namespace,))
    informer = Informer(client, configuration, store, resync_s=3600)
    task = asyncio.create_task(informer.run())
    try:
        yield store, informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.05)


async def test_news_of_each_kind_come_by_the_watch(crds: KubeCluster, client: KubeClient, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "c", "namespace": namespace, "labels": OURS},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    pool = {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "WorkerPool",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {},
    }
    async with informed(crds.kubeconfig, namespace) as (store, _):
        await until(lambda: store.is_synced)
        made = await client.create(model(namespace))
        for obj in (pool, pod(namespace), claim, revision(namespace, "m-1", made)):
            await client.create(obj)
        await client.create({**pod(namespace, "foreign"), "metadata": {"name": "foreign", "namespace": namespace}})
        await until(lambda: all(len(store.objects(kind.name)) == 1 for kind in WATCHED))
        for kind in WATCHED:
            (obj,) = store.objects(kind.name).values()
            assert (obj["kind"], obj["apiVersion"]) == (kind.name, kind.api_version)
        await client.apply_status({**made, "status": {"phase": "Ready"}})
        seen = store.objects("ModelDeployment")
        await until(lambda: (seen[key_of(made)].get("status") or {}).get("phase") == "Ready")
        await client.delete("ModelDeployment", key_of(made))
        await until(lambda: not seen)
        crds.kubectl("label", "pod", "w-0", "--namespace", namespace, f"{names.LABEL_MANAGED_BY}-")
        await until(lambda: not store.objects("Pod"))


async def test_a_watch_outlives_the_api_server(crds: KubeCluster, client: KubeClient, namespace: str) -> None:
    async with informed(crds.kubeconfig, namespace) as (store, _):
        await until(lambda: store.is_synced)
        await client.create(model(namespace, "before"))
        await until(lambda: len(store.objects("ModelDeployment")) == 1)
        await asyncio.to_thread(crds.kill, "kube-apiserver")
        await asyncio.to_thread(crds.start, "kube-apiserver")
        await client.create(model(namespace, "after"))
        await client.delete("ModelDeployment", ObjectKey(namespace, "before"))
        await until(lambda: [key.name for key in store.objects("ModelDeployment")] == ["after"], timeout_s=120)


# --- leading ---

SHORT = Timing(lease_s=4, deadline_s=2.5, renew_s=0.5)


@pytest.fixture
def candidate(crds: KubeCluster, namespace: str) -> Iterator[Callable[[str], Election]]:
    """Makes elections with short leases."""
    made: list[KubeClient] = []

    def make(identity: str) -> Election:
        made.append(KubeClient(find_configuration(str(crds.kubeconfig)), election_client_settings(SHORT)))
        return Election(made[-1], namespace, identity, timing=SHORT)

    yield make


async def test_one_leads_the_next_follows_at_once_and_a_dead_one_is_outwaited(
    crds: KubeCluster, candidate: Callable[[str], Election], namespace: str
) -> None:
    def holder() -> str:
        lease = crds.kubectl_json("get", "lease", names.LEASE_OPERATOR, "--namespace", namespace)
        return str(lease["spec"].get("holderIdentity") or "")

    async with asyncio.timeout(120):
        async with candidate("one") as one:
            await one.wait_leading()
            assert holder() == "one"
        assert not one.is_leader and holder() == ""
        dead = candidate("dead")
        await dead.__aenter__()
        await dead.wait_leading()
        async with candidate("two") as two:
            await until(lambda: two.holder == "dead")
            assert not two.is_leader
            assert dead._task is not None
            dead._task.cancel()  # without the release: as if it had been killed
            await two.wait_leading()
            assert not dead.is_leader and holder() == "two"
