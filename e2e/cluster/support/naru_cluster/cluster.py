"""A cluster of our own: started, used, broken and removed. One object for each; another process may take it up again.

Called by the fixtures and by `python -m naru_cluster`. What a node or the control plane consists of stands in
`naru_cluster.node` and `naru_cluster.control_plane`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from naru_cluster import containerd, layout, machine, network, node_objects
from naru_cluster.api import KubeCluster
from naru_cluster.cgroups import make_cgroup, remove_cgroup
from naru_cluster.components import Component, Components, InsideProcess
from naru_cluster.control_plane import control_plane
from naru_cluster.dns import dns_objects
from naru_cluster.door import open_port
from naru_cluster.errors import ClusterError
from naru_cluster.fake_nodes import fake_node
from naru_cluster.images import node_images
from naru_cluster.layout import FIRST_NODE, Layout, NodeLayout
from naru_cluster.namespaces import Namespaces, read_pid
from naru_cluster.node import node_binds, node_components
from naru_cluster.parts import Parts
from naru_cluster.pki import make_pki, write_kubeconfig

_SUPPORT = Path(__file__).resolve().parents[1]
_FAKE_NODES = "fake-nodes"
_TIMEOUT_S = 30.0


class Cluster(KubeCluster):
    """One cluster; `up` makes it, `down` removes it."""

    def __init__(self, name: str, parts: Parts) -> None:
        self.layout = Layout(name, parts)
        home = {"HOME": str(self.layout.folder / "home")}  # caches of kubectl and Helm must not outlive the cluster
        kubeconfig = self.layout.kubeconfig
        super().__init__(kubeconfig, kubectl=parts.path("kubectl"), helm=parts.path("helm"), environment=home)
        self.name = name
        self.full_node = False
        self.steps: list[tuple[str, float]] = []
        """What was done since `up` began, and when, in seconds."""
        self._began = time.monotonic()
        self._end_with_caller = False
        self._components = Components(self.layout.folder)
        self._nodes: dict[str, tuple[NodeLayout, Namespaces]] = {}

    @classmethod
    def running(cls, name: str, parts: Parts) -> Cluster:
        """Takes up a cluster another process started.

        Raises:
            ClusterError: it does not run.
        """
        cluster = cls(name, parts)
        if not cluster._load():
            raise ClusterError(f"there is no cluster {name!r} in {layout.clusters_folder()}")
        if read_pid(cluster.layout.folder / FIRST_NODE / "run" / "supervisor.pid") is None:
            raise ClusterError(f"the cluster {name!r} has ended: remove what is left with `down`")
        cluster._learn_components()
        return cluster

    def up(self, *, full_node: bool, end_with_caller: bool) -> None:
        """Starts the control plane, with `full_node` the first node too; returns when pods can be created.

        With `end_with_caller` the kernel ends the cluster when this thread of this process ends.

        Raises:
            ClusterError: something did not start; nothing of it is left.
            Unavailable: this machine cannot carry it.
        """
        machine.check(full_node=full_node)
        if self.layout.folder.exists():
            raise ClusterError(f"{self.layout.folder} is there already: is the cluster {self.name!r} running?")
        self._began = time.monotonic()
        self.full_node, self._end_with_caller = full_node, end_with_caller
        try:
            self._start_control_plane()
            if full_node:
                self._start_node(FIRST_NODE)
                self._start_dns()
        except BaseException:
            with contextlib.suppress(ClusterError):
                self.down()
            raise

    def close(self) -> None:
        """Lets go of a cluster that goes on running."""
        if api := self.__dict__.pop("api", None):
            api.close()
        for _, namespaces in self._nodes.values():
            namespaces.close()
        self._components.leave()

    def down(self) -> None:
        """Ends and removes everything, also what a killed owner left; does nothing where nothing is.

        Raises:
            ClusterError: something cannot be removed.
        """
        if api := self.__dict__.pop("api", None):
            api.close()
        if not self._nodes:
            self._load()
        for where, namespaces in reversed(self._nodes.values()):
            namespaces.end()
            remove_cgroup(where.cgroup)
        self._components.reap()
        self._nodes.clear()
        shutil.rmtree(self.layout.folder, ignore_errors=True)
        if self.layout.folder.exists():
            raise ClusterError(f"{self.layout.folder} cannot be removed")

    @functools.cached_property
    def api(self) -> httpx.Client:
        """The API server, as an administrator."""
        pki = self.layout.pki
        context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        server = json.loads(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        return httpx.Client(base_url=server, verify=context, timeout=30.0, trust_env=False)

    def reach(self, host: str, port: int) -> str:
        return open_port(self.layout.door, host, port)

    def reach_service(self, namespace: str, service: str, port: int) -> str:
        answer = self.api.get(f"/api/v1/namespaces/{namespace}/services/{service}").raise_for_status()
        return self.reach(answer.json()["spec"]["clusterIP"], port)

    def run_inside(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, log: str = "inside"
    ) -> InsideProcess:
        return self._components.launch(self._nodes[FIRST_NODE][1], arguments, env or {}, log)

    def inside(self, arguments: Sequence[str], node: str = FIRST_NODE) -> list[str]:
        """The command line that runs `arguments` inside a node.

        Raises:
            ClusterError: there is no such node.
        """
        if node not in self._nodes:
            raise ClusterError(f"there is no node {node!r}: there are {', '.join(self._nodes)}")
        return self._nodes[node][1].command(arguments)

    def start(self, component: str) -> None:
        self._components.start(component)

    def kill(self, component: str) -> None:
        self._components.kill(component)

    def component_states(self) -> Iterator[tuple[str, int | None]]:
        """Each component, and its process id while it runs."""
        for name in self._components.names():
            yield name, self._components.pid(name)

    def component_logs(self) -> Iterator[tuple[str, str]]:
        for name, _ in self._components.log_files():
            yield name, self._components.tail(name, 64 * 1024)

    def node_names(self) -> list[str]:
        """The real nodes; the first one carries the control plane, too."""
        return list(self._nodes) if self.full_node else []

    def add_node(self, name: str) -> None:
        if not self.full_node or name in self._nodes:
            raise ClusterError(f"no node {name!r} can be added: the cluster has {', '.join(self._nodes)}")
        where = self.layout.node(name, len(self._nodes))
        namespaces = self._make_namespaces(where)
        network.plug_in(self._nodes[FIRST_NODE][1], namespaces, where)
        self._learn_components()
        self._start_node(name)

    def fail_node(self, name: str) -> None:
        if name == FIRST_NODE or name not in self._nodes:
            raise ClusterError(f"{name!r} is not a further node")
        where, namespaces = self._nodes.pop(name)
        namespaces.end()
        remove_cgroup(where.cgroup)
        shutil.rmtree(where.folder)
        self._components.forget(f"{name}/")
        self._save()

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
        self._components.start(_FAKE_NODES)
        names = [f"{prefix}-{number}" for number in range(count)]
        for name in names:
            node = fake_node(name, gpus=gpus, cpu=cpu, memory=memory, labels=labels or {}, tainted=self.full_node)
            answer = self.api.post("/api/v1/nodes", json=node)
            if answer.status_code != 409:  # one of that name is there
                answer.raise_for_status()
        for name in names:
            self.wait_for(functools.partial(self._is_schedulable, name), _TIMEOUT_S, f"{name} is ready")
        return names

    def set_gpus(self, node: str, count: int) -> None:
        node_objects.pretend_gpus(self.api, node, count)
        offered = functools.partial(node_objects.offers_gpus, self.api, node, count)
        self.wait_for(offered, _TIMEOUT_S, f"{node} offers {count} GPUs")

    def load_image(self, archive: Path) -> None:
        for name in self.node_names():
            containerd.import_image(*self._nodes[name], archive)

    def kill_pod(self, namespace: str, pod: str) -> None:
        found = self.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}").raise_for_status().json()
        states = found["status"].get("containerStatuses", ())
        running = [s["containerID"].rpartition("/")[2] for s in states if "running" in s["state"]]
        if not running or found["spec"]["nodeName"] not in self._nodes:
            raise ClusterError(f"pod {pod!r} has no running container on a real node")
        for container in running:
            containerd.kill_container(self._nodes[found["spec"]["nodeName"]][0], container)

    def _start_control_plane(self) -> None:
        where = self.layout.node(FIRST_NODE, 0)
        for folder in ("run", "log", "home"):
            (self.layout.folder / folder).mkdir(parents=True)
        make_pki(self.layout.pki, where.address, layout.API_SERVICE)
        self._step("certificates")
        network.make_bridge(self._make_namespaces(where), where.address)
        self._step("namespaces")
        self._learn_components()
        self._components.start("door")
        door = self.reach("127.0.0.1", 6443)
        write_kubeconfig(self.kubeconfig, f"https://{door}", self.layout.pki, "admin")
        self._components.start("etcd", "kube-apiserver")
        self._step("API server")
        self._components.start("kube-controller-manager", "kube-scheduler")
        self._step("controller manager and scheduler")
        # Before it is there, no pod can be created.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.wait_for(lambda: self.api.get(account).is_success, _TIMEOUT_S, "the default service account")
        self._step("default service account")

    def _start_node(self, name: str) -> None:
        where, namespaces = self._nodes[name]
        make_cgroup(where)
        self._components.start(where.component("containerd"))
        self._step(f"{name}: containerd")
        for image in node_images(self.layout.folder / "images", self.layout.parts):
            containerd.import_image(where, namespaces, image)
        self._step(f"{name}: images")
        self._components.start(where.component("kubelet"), where.component("kube-proxy"))
        self._step(f"{name}: ready")

    def _start_dns(self) -> None:
        self.apply(dns_objects())
        self._components.start("coredns")
        namespaces = self._nodes[FIRST_NODE][1]
        # Its own word is not enough: kube-proxy must have the Service.
        self.wait_for(lambda: namespaces.call(_connects, layout.DNS_SERVICE, 53), _TIMEOUT_S, "DNS answers")
        self._step("DNS")

    def _make_namespaces(self, where: NodeLayout) -> Namespaces:
        namespaces = Namespaces(where.folder)
        self._nodes[where.name] = where, namespaces
        self._save()
        binds = node_binds(where) if self.full_node else {}
        namespaces.start(self.layout.parts.path("pause"), binds, end_with_caller=self._end_with_caller)
        return namespaces

    def _learn_components(self) -> None:
        """Makes all components known: they follow from the layout alone."""
        pki = make_pki(self.layout.pki, layout.node_address(0), layout.API_SERVICE)
        hub = self._nodes[FIRST_NODE][1]
        python = {"PYTHONPATH": str(_SUPPORT)}
        door = (sys.executable, "-m", "naru_cluster.door", str(self.layout.door))
        keeper = (sys.executable, "-m", "naru_cluster.fake_nodes", self.layout.server, str(self.layout.pki))
        self._components.add(Component("door", hub, door, self.layout.door.exists, python))
        for component in control_plane(self.layout, pki, hub):
            self._components.add(component)
        for where, namespaces in self._nodes.values() if self.full_node else ():
            ready = functools.partial(self._is_schedulable, where.name)
            for component in node_components(where, pki, namespaces, ready):
                self._components.add(component)
        self._components.add(Component(_FAKE_NODES, hub, keeper, lambda: True, python))

    def _is_schedulable(self, name: str) -> bool:
        return node_objects.is_schedulable(self.api, name)

    def _save(self) -> None:
        known = {"full_node": self.full_node, "end_with_caller": self._end_with_caller}
        nodes = {name: where.index for name, (where, _) in self._nodes.items()}
        (self.layout.folder / "cluster.json").write_text(json.dumps({**known, "nodes": nodes}))

    def _load(self) -> bool:
        try:
            known = json.loads((self.layout.folder / "cluster.json").read_text())
        except FileNotFoundError:
            return False
        self.full_node, self._end_with_caller = known["full_node"], known["end_with_caller"]
        for name, index in known["nodes"].items():
            where = self.layout.node(name, index)
            self._nodes[name] = where, Namespaces(where.folder)
        return True

    def _step(self, what: str) -> None:
        self.steps.append((what, time.monotonic() - self._began))


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except OSError:
        return False
    return True
