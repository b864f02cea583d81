"""A cluster that KUBECONFIG names: kind, minikube or a real one. What only a cluster of our own can do is refused."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import httpx

from naru_cluster.api import KubeCluster, NotOurs
from naru_cluster.components import InsideProcess
from naru_cluster.errors import ClusterError, Unavailable
from naru_cluster.parts import find_parts

_PORT = re.compile(r"127\.0\.0\.1:(\d+)")


class ExistingCluster(KubeCluster):
    """An existing cluster; `close` ends what was opened to it."""

    def __init__(self, kubeconfig: Path) -> None:
        if not kubeconfig.is_file():
            raise ClusterError(f"KUBECONFIG names {str(kubeconfig)!r}, which is no file")
        super().__init__(kubeconfig, kubectl=_program("kubectl"), helm=_program("helm"), environment={})
        self._children: list[subprocess.Popen[str]] = []

    @functools.cached_property
    def api(self) -> httpx.Client:
        """The API server through `kubectl proxy`, which knows every way to log in."""
        return httpx.Client(base_url=f"http://{self._open('proxy', '--port=0')}", timeout=30.0, trust_env=False)

    def reach(self, host: str, port: int) -> str:
        _refuse(f"reaching {host}:{port} by its address")

    def reach_service(self, namespace: str, service: str, port: int) -> str:
        return self._open("port-forward", "--namespace", namespace, f"service/{service}", f":{port}")

    def run_inside(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, log: str = "inside"
    ) -> InsideProcess:
        _refuse("starting a process inside")

    def start(self, component: str) -> None:
        _refuse(f"starting {component}")

    def kill(self, component: str) -> None:
        _refuse(f"killing {component}")

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
        _refuse("adding fake nodes")

    def set_gpus(self, node: str, count: int) -> None:
        _refuse("pretending GPUs")

    def load_image(self, archive: Path) -> None:
        _refuse(f"importing {archive.name}")

    def add_node(self, name: str) -> None:
        _refuse("adding a node")

    def fail_node(self, name: str) -> None:
        _refuse("failing a node")

    def kill_pod(self, namespace: str, pod: str) -> None:
        _refuse(f"killing the processes of {pod}")

    def component_logs(self) -> Iterator[tuple[str, str]]:
        yield from ()

    def close(self) -> None:
        """Ends the proxy and the forwarded ports."""
        if "api" in self.__dict__:
            self.api.close()
        for child in self._children:
            child.terminate()
            child.wait()
            with contextlib.suppress(OSError):
                assert child.stdout is not None
                child.stdout.close()

    def _open(self, *arguments: str) -> str:
        child = subprocess.Popen(
            self.kubectl_command(*arguments), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        if match := _PORT.search(line):
            return match[0]
        raise ClusterError(f"`kubectl {' '.join(arguments)}` opened no port: {line.strip()!r}")


def _program(name: str) -> str:
    found = shutil.which(name)
    try:
        return found or find_parts().path(name)
    except Unavailable as exc:
        raise Unavailable(f"{name} is not on the PATH: install it, or run `make cluster-parts`") from exc


def _refuse(what: str) -> NoReturn:
    raise NotOurs(f"{what} needs a cluster of the tests' own, and KUBECONFIG is {os.environ.get('KUBECONFIG')!r}")
