"""The operator's own process on a real API server, with a real Redis and a fleet of fake workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import redis
from naru_cluster.api import KubeCluster

from naru_operator.adapters.ports import free_port
from naru_operator.adapters.redis_server import find_redis_server
from naru_proto import names
from naru_proto.registry import ModelRecord

FLEET = Path(__file__).parent / "fake_fleet.py"
API = f"/apis/{names.API_GROUP}/{names.API_VERSION}"


class OperatorStack:
    """One namespace's worth of Naru without engines. A context; leaving ends every process it started."""

    def __init__(self, cluster: KubeCluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self._redis_port = free_port("127.0.0.1")
        self.redis_url = f"redis://127.0.0.1:{self._redis_port}/0"
        self.board = redis.Redis.from_url(self.redis_url)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.health: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.start_redis()
        fleet = [sys.executable, str(FLEET), self.redis_url, "--kubeconfig", str(self.cluster.kubeconfig)]
        self._start("fleet", [*fleet, "--namespace", self.namespace])
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        self.board.close()

    def start_redis(self) -> None:
        """An empty Redis, at the same address each time."""
        program = [str(find_redis_server()), "--port", str(self._redis_port), "--save", "", "--dir", str(self.folder)]
        self._start("redis", program)
        self.cluster.wait_for(self._redis_answers, 10, "Redis answers")

    def start_operator(self, name: str = "operator", **settings: str) -> None:
        """An operator; several under different names are replicas."""
        port = free_port("127.0.0.1")
        self.health[name] = f"http://127.0.0.1:{port}"
        env = {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "NARU_OPERATOR_REDIS_URL": self.redis_url,
            "NARU_OPERATOR_NAMESPACE": self.namespace,
            "NARU_OPERATOR_IDENTITY": name,
            "NARU_OPERATOR_WORKER_IMAGE": "naru.local/worker:e2e",
            "NARU_OPERATOR_WORKER_REDIS_SECRET": "naru-redis",
            "NARU_OPERATOR_HEALTH_LISTEN": f"127.0.0.1:{port}",
            "NARU_OPERATOR_RESYNC_S": "5",
            **{f"NARU_OPERATOR_{key.upper()}": value for key, value in settings.items()},
        }
        self._start(name, [sys.executable, "-m", "naru_operator"], env)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Ends a process and waits for it."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(30)

    def log(self, name: str = "operator") -> str:
        """What a process has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def is_ready(self, name: str = "operator") -> bool:
        """Whether the operator says that it is."""
        try:
            return httpx.get(f"{self.health[name]}/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def apply(self, *items: dict[str, Any]) -> None:
        """Applies objects in the namespace."""
        self.cluster.apply(list(items), self.namespace)

    def get(self, plural: str, name: str) -> dict[str, Any]:
        """One of our objects, empty where there is none."""
        reply = self.cluster.api.get(f"{API}/namespaces/{self.namespace}/{plural}/{name}")
        found: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        return found

    def status(self, plural: str, name: str) -> dict[str, Any]:
        """The status of one of our objects."""
        return dict(self.get(plural, name).get("status") or {})

    def pods(self) -> list[dict[str, Any]]:
        """Worker pods that are not about to go, by name."""
        listed = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods").json()["items"]
        alive = [pod for pod in listed if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: str(pod["metadata"]["name"]))

    def records(self) -> dict[str, ModelRecord]:
        """The registry."""
        stored: dict[bytes, bytes] = self.board.hgetall(names.KEY_MODELS)  # type: ignore[assignment]
        return {key.decode(): ModelRecord.from_json(text) for key, text in stored.items()}

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """The first true value of the condition; fails with the operator's last words when time is up."""
        try:
            return self.cluster.wait_for(condition, timeout_s, what)
        except AssertionError as exc:
            tails = "\n".join(f"--- {path.stem}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))
            raise AssertionError(f"{exc}\n{tails}") from exc

    def wait_phase(self, name: str, phase: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """A model's status, once it speaks of the newest spec and has the phase."""

        def there() -> dict[str, Any] | None:
            item = self.get("modeldeployments", name)
            status: dict[str, Any] = item.get("status") or {}
            is_new = status.get("observedGeneration") == item["metadata"]["generation"]
            return status if is_new and status.get("phase") == phase else None

        found: dict[str, Any] = self.wait(there, f"{name} is {phase}", timeout_s)
        return found

    def _redis_answers(self) -> bool:
        try:
            return bool(self.board.ping())
        except redis.ConnectionError:
            return False

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, stdout=log, stderr=subprocess.STDOUT
            )


def pool(name: str = "default", workers: int = 2, **spec: Any) -> dict[str, Any]:
    """A WorkerPool."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "WorkerPool",
        "metadata": {"name": name},
        "spec": {"workers": {"min": workers}, "moveTimeout": "5s", "drainTimeout": "5s", **spec},
    }


def model(name: str, uri: str = "hf://org/one", **spec: Any) -> dict[str, Any]:
    """A ModelDeployment."""
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": {"model": {"uri": uri}, **spec},
    }


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition; empty where there is none."""
    return next((dict(it) for it in status.get("conditions") or () if it["type"] == kind), {})


def settle(seconds: float) -> None:
    """Lets time pass in which nothing may happen: absence has no event to wait for."""
    time.sleep(seconds)
