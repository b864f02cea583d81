"""The real node the stories stand on: pods run, Services and names answer, limits and budgets hold."""

from __future__ import annotations

import subprocess
from typing import Any

import httpx
import pytest
from naru_cluster.api import KubeCluster
from naru_cluster.images import TINY_IMAGE


def tiny(name: str, command: str, **fields: Any) -> dict[str, Any]:
    """A pod that runs a line of shell."""
    main = {"name": "main", "image": TINY_IMAGE, "command": ["sh", "-c", command], **fields}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [main], "terminationGracePeriodSeconds": 1, "restartPolicy": "Never"},
    }


WEB = "echo served > /www/index.html; exec httpd -f -p 8080 -h /www"
READY = {"httpGet": {"path": "/index.html", "port": 8080}, "periodSeconds": 1}


def service(name: str) -> dict[str, Any]:
    ports = [{"port": 80, "targetPort": 8080}]
    spec = {"selector": {"app": name}, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def read(cluster: KubeCluster, namespace: str, name: str) -> dict[str, Any]:
    answer = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}").raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def wait_ready(cluster: KubeCluster, namespace: str, name: str) -> dict[str, Any]:
    def ready() -> dict[str, Any] | None:
        found = read(cluster, namespace, name)
        conditions = found["status"].get("conditions", ())
        return found if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions) else None

    return cluster.wait_for(ready, 60.0, f"{name} is ready")


def wait_ended(cluster: KubeCluster, namespace: str, name: str) -> dict[str, Any]:
    """How the pod's container ended."""

    def ended() -> dict[str, Any] | None:
        states = read(cluster, namespace, name)["status"].get("containerStatuses", [{}])
        found: dict[str, Any] | None = states[0].get("state", {}).get("terminated")
        return found

    return cluster.wait_for(ended, 60.0, f"{name} has ended")


def served(address: str) -> bool:
    return httpx.get(f"http://{address}/index.html", trust_env=False).text == "served\n"


@pytest.fixture
def web(cluster: KubeCluster, cluster_namespace: str) -> str:
    """A web server behind a Service that answers, both of that name."""
    cluster.apply([tiny("web", WEB, readinessProbe=READY), service("web")], cluster_namespace)
    here = cluster.reach_service(cluster_namespace, "web", 80)
    cluster.wait_for(lambda: served(here), 60.0, "the Service leads to the ready pod")
    return "web"


def test_a_service_answers_from_a_pod_and_from_here(cluster: KubeCluster, cluster_namespace: str, web: str) -> None:
    assert served(cluster.reach_service(cluster_namespace, web, 80))
    address = cluster.kubectl_json("get", "service", web, "--namespace", cluster_namespace)["spec"]["clusterIP"]
    cluster.apply(tiny("client", f"wget -qO- http://{address}/index.html"), cluster_namespace)
    assert wait_ended(cluster, cluster_namespace, "client")["exitCode"] == 0
    assert cluster.kubectl("logs", "client", "--namespace", cluster_namespace) == "served\n"


def test_names_of_services_are_looked_up_and_unknown_ones_are_not_there(
    cluster: KubeCluster, cluster_namespace: str, web: str
) -> None:
    # busybox's own lookup of names crashes when it is linked statically; ping only prints the address it found.
    client = "ping -c 1 -W 1 web | head -n 1; ping -c 1 -W 1 absent 2>&1 | head -n 1"
    cluster.apply(tiny("resolver", client), cluster_namespace)
    wait_ended(cluster, cluster_namespace, "resolver")
    address = cluster.kubectl_json("get", "service", web, "--namespace", cluster_namespace)["spec"]["clusterIP"]
    known, unknown = cluster.kubectl("logs", "resolver", "--namespace", cluster_namespace).splitlines()
    assert f"({address})" in known
    assert "bad address 'absent'" in unknown


def test_a_container_that_passes_its_memory_is_killed_with_that_reason(
    cluster: KubeCluster, cluster_namespace: str
) -> None:
    limits = {"limits": {"memory": "16Mi"}}
    cluster.apply(tiny("greedy", "tail /dev/zero", resources=limits), cluster_namespace)
    ended = wait_ended(cluster, cluster_namespace, "greedy")
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_an_eviction_waits_for_what_a_budget_allows(cluster: KubeCluster, cluster_namespace: str, web: str) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": web},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": web}}},
    }
    cluster.apply(budget, cluster_namespace)
    budgets = f"/apis/policy/v1/namespaces/{cluster_namespace}/poddisruptionbudgets/{web}"
    cluster.wait_for(
        lambda: cluster.api.get(budgets).json().get("status", {}).get("currentHealthy") == 1, 30.0, "it is counted"
    )
    pod = f"/api/v1/namespaces/{cluster_namespace}/pods/{web}"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": web}}
    refused = cluster.api.post(f"{pod}/eviction", json=eviction)
    assert refused.status_code == 429
    assert "disruption budget" in refused.json()["message"]

    cluster.api.delete(budgets).raise_for_status()
    cluster.wait_for(lambda: cluster.api.post(f"{pod}/eviction", json=eviction).is_success, 30.0, "it is let go")
    cluster.wait_for(lambda: cluster.api.get(pod).status_code == 404, 30.0, "it is gone")


def test_a_killed_container_is_started_again_by_the_kubelet(cluster: KubeCluster, cluster_namespace: str) -> None:
    pod = tiny("again", "sleep 3600")
    pod["spec"]["restartPolicy"] = "Always"
    cluster.apply(pod, cluster_namespace)
    wait_ready(cluster, cluster_namespace, "again")
    cluster.kill_pod(cluster_namespace, "again")

    def restarted() -> bool:
        (state,) = read(cluster, cluster_namespace, "again")["status"]["containerStatuses"]
        return bool(
            state["restartCount"] == 1 and state["ready"] and state["lastState"]["terminated"]["exitCode"] == 137
        )

    cluster.wait_for(restarted, 60.0, "it runs again")


def test_pods_are_told_to_end_and_killed_after_their_grace(cluster: KubeCluster, cluster_namespace: str) -> None:
    cluster.apply(tiny("stubborn", "trap 'echo told' TERM; echo began; while :; do sleep 0.1; done"), cluster_namespace)
    wait_ready(cluster, cluster_namespace, "stubborn")
    follow = ["logs", "stubborn", "--follow", "--namespace", cluster_namespace]
    with subprocess.Popen(
        cluster.kubectl_command(*follow), env=cluster.environment, stdout=subprocess.PIPE, text=True
    ) as logs:
        assert logs.stdout is not None
        assert logs.stdout.readline() == "began\n"
        path = f"/api/v1/namespaces/{cluster_namespace}/pods/stubborn"
        cluster.api.delete(path).raise_for_status()
        cluster.wait_for(lambda: cluster.api.get(path).status_code == 404, 30.0, "it is gone")
        output, _ = logs.communicate(timeout=30)
    assert output == "told\n"


def test_pretended_gpus_are_given_out_and_run_out(cluster: KubeCluster, cluster_namespace: str) -> None:
    cluster.set_gpus("n0", 8)
    for name, gpus in (("six", "6"), ("three", "3")):
        cluster.apply(tiny(name, "sleep 3600", resources={"limits": {"nvidia.com/gpu": gpus}}), cluster_namespace)
    wait_ready(cluster, cluster_namespace, "six")

    def refused() -> str | None:
        conditions = read(cluster, cluster_namespace, "three")["status"].get("conditions", ())
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), None)

    assert "1 Insufficient nvidia.com/gpu" in cluster.wait_for(refused, 30.0, "the scheduler says why")


def test_pods_go_on_while_the_kubelet_and_containerd_are_killed(
    cluster: KubeCluster, cluster_namespace: str, web: str
) -> None:
    here = cluster.reach_service(cluster_namespace, web, 80)
    before = read(cluster, cluster_namespace, web)["status"]["containerStatuses"][0]["containerID"]
    for component in ("kubelet", "containerd"):
        cluster.kill(component)
    try:
        assert served(here)
    finally:
        for component in ("containerd", "kubelet"):
            cluster.start(component)
    after = wait_ready(cluster, cluster_namespace, web)["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before, 0)


def test_a_second_node_takes_pods_that_reach_the_first(cluster: KubeCluster, cluster_namespace: str, web: str) -> None:
    cluster.add_node("n1")
    address = read(cluster, cluster_namespace, web)["status"]["podIP"]
    pod = tiny("far", f"wget -qO- http://{address}:8080/index.html")
    pod["spec"]["nodeName"] = "n1"
    cluster.apply(pod, cluster_namespace)
    assert wait_ended(cluster, cluster_namespace, "far")["exitCode"] == 0
    assert cluster.kubectl("logs", "far", "--namespace", cluster_namespace) == "served\n"
    cluster.fail_node("n1")
    cluster.api.delete("/api/v1/nodes/n1").raise_for_status()
