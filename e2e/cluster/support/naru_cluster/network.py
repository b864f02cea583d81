"""The network inside: the first node has a bridge, further nodes are plugged into it. Nothing of it is seen outside."""

from __future__ import annotations

import subprocess

from naru_cluster import layout
from naru_cluster.errors import ClusterError
from naru_cluster.layout import NodeLayout
from naru_cluster.namespaces import Namespaces

_DEVICE = "node0"


def make_bridge(namespaces: Namespaces, address: str) -> None:
    """Gives the first node its address, on a bridge.

    Raises:
        ClusterError: the kernel refuses something.
    """
    _ip(namespaces, f"link add {_DEVICE} type bridge")
    _give_address(namespaces, address)


def plug_in(hub: Namespaces, namespaces: Namespaces, where: NodeLayout) -> None:
    """Connects a further node to the first, and the pods of both.

    Raises:
        ClusterError: the kernel refuses something.
    """
    _ip(namespaces, f"link add {_DEVICE} type veth peer name v-{where.name} netns {hub.init_pid}")
    _ip(hub, f"link set v-{where.name} master {_DEVICE} up")
    _give_address(namespaces, where.address)
    _ip(namespaces, f"route add {layout.POD_RANGE} via {layout.node_address(0)}")
    _ip(hub, f"route replace {where.pod_range} via {where.address}")


def _give_address(namespaces: Namespaces, address: str) -> None:
    _ip(namespaces, f"link set {_DEVICE} up")
    _ip(namespaces, f"address add {address}/24 dev {_DEVICE}")
    # A connection to a Service needs some route before its address is rewritten.
    _ip(namespaces, f"route add {layout.SERVICE_RANGE} dev {_DEVICE}")
    forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
    subprocess.run(namespaces.command(forward, network_only=True), check=True)


def _ip(namespaces: Namespaces, arguments: str) -> None:
    command = namespaces.command(["ip", *arguments.split()], network_only=True)
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"`ip {arguments}` failed: {done.stderr.strip()}")
