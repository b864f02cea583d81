"""Where everything of one cluster is: its folder, its addresses, its certificates. Data without behaviour of its own.

Addresses are the same in every cluster: each has a network of its own, and nothing of it is seen outside.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from naru_cluster.parts import Parts

FIRST_NODE = "n0"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
POD_RANGE = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"


def clusters_folder() -> Path:
    """Where clusters are kept while they run: NARU_CLUSTER_HOME, or a folder that is not in memory.

    Unix sockets lie below it, so the path must be short.
    """
    return Path(os.environ.get("NARU_CLUSTER_HOME") or "/var/tmp/naru-cluster")


@dataclass(frozen=True, slots=True)
class Layout:
    """One cluster on disk."""

    name: str
    parts: Parts

    @property
    def folder(self) -> Path:
        """Everything of the cluster; removed with it."""
        return clusters_folder() / self.name

    @property
    def pki(self) -> Path:
        """Certificates."""
        return self.folder / "pki"

    @property
    def kubeconfig(self) -> Path:
        """For this machine: leads through the door."""
        return self.folder / "kubeconfig"

    @property
    def door(self) -> Path:
        """The door's socket."""
        return self.folder / "run" / "door.sock"

    @property
    def server(self) -> str:
        """The API server's address inside."""
        return f"https://{node_address(0)}:6443"

    def inner_kubeconfig(self, user: str) -> Path:
        """For a component: leads to the API server's address inside."""
        return self.folder / f"{user}.kubeconfig"

    def node(self, name: str, index: int) -> NodeLayout:
        """The layout of one of its nodes."""
        return NodeLayout(self, name, index)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """One node on disk; `index` decides its addresses."""

    cluster: Layout
    name: str
    index: int

    @property
    def folder(self) -> Path:
        """Everything of the node."""
        return self.cluster.folder / self.name

    @property
    def address(self) -> str:
        """Its address inside."""
        return node_address(self.index)

    @property
    def pod_range(self) -> str:
        """Addresses of its pods."""
        return f"10.244.{self.index}.0/24"

    @property
    def cgroup(self) -> str:
        """Name of the control group of its pods."""
        return f"naru-{self.cluster.name}-{self.name}"

    @property
    def containerd_socket(self) -> Path:
        """Where containerd listens."""
        return self.folder / "containerd" / "c.sock"

    def component(self, name: str) -> str:
        """The component's name: the first node's have none of the node's own."""
        return name if self.name == FIRST_NODE else f"{self.name}/{name}"

    @property
    def binds(self) -> dict[Path, str]:
        """Folders the parts have fixed paths for, whatever their options say: source → path inside."""
        fixed = {"kubelet": "/var/lib/kubelet", "pods": "/var/log/pods", "containers": "/var/log/containers"}
        return {self.folder / name: path for name, path in {**fixed, "cni-state": "/var/lib/cni"}.items()}


def node_address(index: int) -> str:
    """Address of the node with that number."""
    return f"10.99.0.{index + 1}"
