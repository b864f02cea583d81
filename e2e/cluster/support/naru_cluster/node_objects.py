"""Node objects at the API server: whether a node takes pods, and GPUs and nodes that are not there."""

from __future__ import annotations

import httpx


def is_schedulable(api: httpx.Client, name: str) -> bool:
    """Whether a node is ready and without the taints of one that is not; False while nobody answers."""
    try:
        answer = api.get(f"/api/v1/nodes/{name}")
    except httpx.TransportError:
        return False
    if not answer.is_success:
        return False
    node = answer.json()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", ()))
    return ready and not any(taint["key"].startswith("node.kubernetes.io/") for taint in node["spec"].get("taints", ()))


def pretend_gpus(api: httpx.Client, name: str, count: int) -> None:
    """Writes a node's capacity of nvidia.com/gpu; the kubelet offers it with its next status.

    Raises:
        httpx.HTTPError: the API server refuses or does not answer.
    """
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
    headers = {"content-type": "application/json-patch+json"}
    api.patch(f"/api/v1/nodes/{name}/status", headers=headers, json=patch).raise_for_status()


def offers_gpus(api: httpx.Client, name: str, count: int) -> bool:
    """Whether pods can be given that many GPUs of a node, no more and no fewer."""
    status = api.get(f"/api/v1/nodes/{name}").raise_for_status().json()["status"]
    return bool(status["allocatable"].get("nvidia.com/gpu") == str(count))
