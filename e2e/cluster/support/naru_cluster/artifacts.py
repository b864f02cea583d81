"""What a failed test leaves for people: pods, events, our objects, logs of our pods, ends of component logs.

Called by the hook in `e2e/conftest.py`. Never fails a test itself: what cannot be had is said in the file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from naru_cluster.api import KubeCluster

ARTIFACTS = Path(__file__).resolve().parents[3] / "artifacts"
_QUERIES = {
    "pods.txt": ("get", "pods", "--all-namespaces", "--output", "wide"),
    "events.txt": ("get", "events", "--all-namespaces", "--sort-by", ".lastTimestamp"),
    "objects.yaml": ("get", "naru", "--all-namespaces", "--output", "yaml"),
    "pods.yaml": ("get", "pods", "--all-namespaces", "--output", "yaml"),
    "workloads.txt": ("get", "deployments,services,pvc,pdb,leases", "--all-namespaces", "--output", "wide"),
    "nodes.txt": ("describe", "nodes"),
}
_TIMEOUT_S = 20.0
_MAX_PODS = 40


def collect(cluster: KubeCluster, test: str) -> Path:
    """Writes everything into a folder named after the test, emptied before; returns it."""
    folder = ARTIFACTS / re.sub(r"[^A-Za-z0-9_.-]+", "_", test)[:150]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, query in _QUERIES.items():
        (folder / name).write_text(_ask(cluster, *query))
    for namespace, pod in _pods(cluster):
        where = ("--namespace", namespace, pod, "--all-containers", "--tail", "500")
        text = _ask(cluster, "logs", *where)
        previous = _ask(cluster, "logs", *where, "--previous")
        (folder / f"pod-{namespace}-{pod}.log").write_text(f"{text}\n--- before its last restart ---\n{previous}")
    for name, text in cluster.component_logs():
        (folder / f"component-{name}.log").write_text(text)
    return folder


def _pods(cluster: KubeCluster) -> Iterator[tuple[str, str]]:
    """Running pods with real containers behind them."""
    columns = "custom-columns=:metadata.namespace,:metadata.name,:status.containerStatuses[0].containerID"
    lines = _ask(cluster, "get", "pods", "--all-namespaces", "--no-headers", "--output", columns).splitlines()
    for line in lines[:_MAX_PODS]:
        parts = line.split()
        if len(parts) == 3 and "://" in parts[2]:
            yield parts[0], parts[1]


def _ask(cluster: KubeCluster, *arguments: str) -> str:
    try:
        done = cluster.try_kubectl(*arguments, "--request-timeout=10s", timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{exc}\n"
    return done.stdout + done.stderr
