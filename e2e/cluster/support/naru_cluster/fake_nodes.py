"""Nodes that are not there: kept ready by their leases, and pods bound to them become ready without running.

`python -m naru_cluster.fake_nodes` is started inside a cluster by `naru_cluster.cluster`; it acts on every node with
the label `naru-cluster/fake`. A pod with the annotation `naru-cluster/hold: "true"` is left as it is.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

LABEL = "naru-cluster/fake"
TAINT = {"key": LABEL, "effect": "NoSchedule"}
HOLD = "naru-cluster/hold"
_RENEW_S = 10.0
_LEASE_S = 40
_RETRY_S = 0.5
_MERGE = {"content-type": "application/merge-patch+json"}
_STRATEGIC = {"content-type": "application/strategic-merge-patch+json"}


def fake_node(
    name: str, *, gpus: int, cpu: str, memory: str, labels: Mapping[str, str], tainted: bool
) -> dict[str, Any]:
    """A Node object that offers these amounts; its status must be written too."""
    amounts = {"cpu": cpu, "memory": memory, "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    own = {LABEL: "", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": "kept ready", "lastHeartbeatTime": _now()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**own, **labels}},
        "spec": {"taints": [TAINT]} if tainted else {},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{**ready, "lastTransitionTime": _now()}],
            "addresses": [{"type": "Hostname", "address": name}],
            "nodeInfo": {"kubeletVersion": "v0.0.0-fake"},
        },
    }


def running(pod: Mapping[str, Any], address: str) -> dict[str, Any]:
    """The status of a pod whose containers all run and are ready."""
    now = _now()
    kinds = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
    containers = [
        {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": True, "started": True,
            "restartCount": 0, "state": {"running": {"startedAt": now}},
        }
        for container in pod["spec"]["containers"]
    ]  # fmt: skip
    return {
        "phase": "Running",
        "startTime": now,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        "containerStatuses": containers,
    }


class Keeper:
    """Keeps fake nodes and their pods alive until its process is ended."""

    def __init__(self, api: httpx.AsyncClient) -> None:
        self._api = api
        self._fake: set[str] = set()
        self._addresses = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Does so for ever; the API server may be away meanwhile."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._again(self._follow_nodes))
            group.create_task(self._again(self._follow_pods))
            group.create_task(self._again(self._renew))

    async def _again(self, work: Any) -> None:
        while True:
            try:
                await work()
            except (httpx.HTTPError, KeyError, json.JSONDecodeError) as exc:
                print(f"{work.__name__}: {exc!r}", file=sys.stderr, flush=True)
                await asyncio.sleep(_RETRY_S)

    async def _follow_nodes(self) -> None:
        async for kind, node in self._watch("/api/v1/nodes", {"labelSelector": LABEL}):
            name = node["metadata"]["name"]
            if kind == "DELETED":
                self._fake.discard(name)
            elif name not in self._fake:
                await self._write_lease(name)
                self._fake.add(name)
                await self._settle_pods(name)

    async def _follow_pods(self) -> None:
        async for kind, pod in self._watch("/api/v1/pods", {"fieldSelector": "spec.nodeName!="}):
            if kind != "DELETED" and pod["spec"]["nodeName"] in self._fake:
                task = asyncio.get_running_loop().create_task(self._settle(pod))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _settle_pods(self, node: str) -> None:
        answer = await self._api.get("/api/v1/pods", params={"fieldSelector": f"spec.nodeName={node}"})
        for pod in answer.raise_for_status().json()["items"]:
            await self._settle(pod)

    async def _settle(self, pod: Mapping[str, Any]) -> None:
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if meta.get("annotations", {}).get(HOLD) == "true" and "deletionTimestamp" not in meta:
            return
        try:
            if "deletionTimestamp" in meta:
                await self._api.request(
                    "DELETE", path, json={"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
                )
            elif pod["status"].get("phase") == "Pending":
                self._addresses += 1
                address = f"10.244.{128 + self._addresses // 250 % 100}.{1 + self._addresses % 250}"
                status = {"metadata": {"uid": meta["uid"]}, "status": running(pod, address)}
                await self._api.patch(f"{path}/status", headers=_STRATEGIC, json=status)
        except httpx.HTTPError as exc:
            print(f"{path}: {exc!r}", file=sys.stderr, flush=True)

    async def _renew(self) -> None:
        for name in sorted(self._fake):
            await self._write_lease(name)
        await asyncio.sleep(_RENEW_S)

    async def _write_lease(self, node: str) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": node, "leaseDurationSeconds": _LEASE_S, "renewTime": _now(micro=True)}
        answer = await self._api.patch(f"{leases}/{node}", headers=_MERGE, json={"spec": spec})
        if answer.status_code == 404:
            answer = await self._api.post(leases, json={"metadata": {"name": node}, "spec": spec})
        answer.raise_for_status()

    async def _watch(self, path: str, params: dict[str, str]) -> Any:
        """Everything there is, then every change, until the connection ends."""
        found = (await self._api.get(path, params=params)).raise_for_status().json()
        for item in found["items"]:
            yield "ADDED", item
        version = found["metadata"]["resourceVersion"]
        options = {**params, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with self._api.stream("GET", path, params=options, timeout=None) as stream:
            async for line in stream.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]


def _now(*, micro: bool = False) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="microseconds" if micro else "seconds").replace("+00:00", "Z")


async def _main(server: str, pki: Path) -> None:
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    async with httpx.AsyncClient(base_url=server, verify=context, timeout=10.0, trust_env=False) as api:
        await Keeper(api).run()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2])))
