"""What tests use of a cluster, whoever runs it: kubectl, helm, the API as HTTP, and ways in.

`naru_cluster.cluster` implements it for a cluster of our own, `naru_cluster.existing` for one that KUBECONFIG names.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from naru_cluster.components import InsideProcess
from naru_cluster.errors import ClusterError, CommandFailed

T = TypeVar("T")


class NotOurs(ClusterError):
    """Something only a cluster of our own can do was asked of an existing one; tests that need it are skipped."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command did."""

    rc: int
    stdout: str
    stderr: str


class KubeCluster(ABC):
    """A cluster that tests talk to."""

    def __init__(self, kubeconfig: Path, *, kubectl: str, helm: str, environment: Mapping[str, str]) -> None:
        self.kubeconfig = kubeconfig
        """Reaches the API server from this process, as an administrator."""
        self._kubectl = kubectl
        self._helm = helm
        self.environment = {**os.environ, **environment, "KUBECONFIG": str(kubeconfig)}

    @property
    @abstractmethod
    def api(self) -> httpx.Client:
        """The API server, as an administrator; paths as in "/api/v1/pods"."""

    @abstractmethod
    def reach(self, host: str, port: int) -> str:
        """Opens a way to an address inside (pod, Service, node) and returns the "127.0.0.1:PORT" that leads there."""

    @abstractmethod
    def reach_service(self, namespace: str, service: str, port: int) -> str:
        """Opens a way to a Service and returns the "127.0.0.1:PORT" that leads there."""

    @abstractmethod
    def run_inside(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, log: str = "inside"
    ) -> InsideProcess:
        """Starts a process in the network, mounts and process space of the first node; it ends with the cluster."""

    @abstractmethod
    def start(self, component: str) -> None:
        """Starts a component that does not run, and waits until it is ready."""

    @abstractmethod
    def kill(self, component: str) -> None:
        """Kills a component as `kill -9` does, and returns when it is gone."""

    def restart(self, component: str) -> None:
        """Kills a component and starts it again."""
        self.kill(component)
        self.start(component)

    @abstractmethod
    def add_fake_nodes(
        self,
        count: int,
        *,
        gpus: int = 8,
        cpu: str = "64",
        memory: str = "512Gi",
        labels: Mapping[str, str] | None = None,
        prefix: str = "gpu",
    ) -> list[str]:
        """Adds ready nodes on which pods become ready without running; returns their names when they are ready."""

    @abstractmethod
    def set_gpus(self, node: str, count: int) -> None:
        """Makes a real node offer that many nvidia.com/gpu; returns when pods can be given them."""

    @abstractmethod
    def load_image(self, archive: Path) -> None:
        """Imports an archive (OCI or docker) into every real node."""

    @abstractmethod
    def add_node(self, name: str) -> None:
        """Adds one more real node; returns when it is ready."""

    @abstractmethod
    def fail_node(self, name: str) -> None:
        """Ends a node that was added as a power cut does."""

    @abstractmethod
    def kill_pod(self, namespace: str, pod: str) -> None:
        """Kills the processes of a pod's containers from the node, as the kernel does when memory runs out."""

    @abstractmethod
    def component_logs(self) -> Iterator[tuple[str, str]]:
        """The ends of the components' logs: name, text."""

    def kubectl_command(self, *arguments: str) -> list[str]:
        """The command line of kubectl, to be run with `environment`: for commands that go on."""
        return [self._kubectl, *arguments]

    def try_kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> Completed:
        """Runs kubectl and returns what it did, whatever that was."""
        return self._run([self._kubectl, *arguments], stdin, timeout_s)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 60.0) -> str:
        """Runs kubectl and returns what it wrote.

        Raises:
            CommandFailed: it ended with a status other than 0.
        """
        return self._checked([self._kubectl, *arguments], stdin, timeout_s)

    def kubectl_json(self, *arguments: str) -> Any:
        """Runs kubectl with `--output json` and returns the parsed answer."""
        return json.loads(self.kubectl(*arguments, "--output", "json"))

    def helm(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """Runs Helm and returns what it wrote.

        Raises:
            CommandFailed: it ended with a status other than 0.
        """
        return self._checked([self._helm, *arguments], None, timeout_s)

    def try_helm(self, *arguments: str, timeout_s: float = 300.0) -> Completed:
        """Runs Helm and returns what it did, whatever that was."""
        return self._run([self._helm, *arguments], None, timeout_s)

    def apply(
        self, manifest: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], namespace: str | None = None
    ) -> str:
        """Applies YAML text, one object or several with kubectl; unknown fields are refused."""
        if isinstance(manifest, Mapping):
            manifest = json.dumps(manifest)
        elif not isinstance(manifest, str):
            manifest = "\n---\n".join(json.dumps(item) for item in manifest)
        where = ("--namespace", namespace) if namespace else ()
        return self.kubectl("apply", *where, "--filename", "-", stdin=manifest)

    def wait_established(self, *definitions: str) -> None:
        """Waits until custom resources are served; `kubectl wait` fails on a definition that has no status yet."""
        for name in definitions:
            path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"

            def established(path: str = path) -> bool:
                conditions = self.api.get(path).raise_for_status().json().get("status", {}).get("conditions") or ()
                return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

            self.wait_for(established, 30.0, f"{name} is served")

    def wait_for(self, condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Polls until the condition gives something true, and returns that.

        A failed connection counts as "not yet": components may be down meanwhile.

        Raises:
            AssertionError: time is up.
        """
        deadline = time.monotonic() + timeout_s
        last: object = None
        while True:
            try:
                if value := condition():
                    return value
                last = value
            except (httpx.TransportError, CommandFailed) as exc:
                last = exc
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s} s: {what} (last seen: {last!r})")
            time.sleep(0.1)

    def _checked(self, command: list[str], stdin: str | None, timeout_s: float) -> str:
        done = self._run(command, stdin, timeout_s)
        if done.rc:
            raise CommandFailed(shlex.join([Path(command[0]).name, *command[1:]]), done.rc, done.stdout, done.stderr)
        return done.stdout

    def _run(self, command: list[str], stdin: str | None, timeout_s: float) -> Completed:
        done = subprocess.run(
            command,
            check=False,
            input=stdin or "",
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout_s,
        )
        return Completed(done.returncode, done.stdout, done.stderr)
