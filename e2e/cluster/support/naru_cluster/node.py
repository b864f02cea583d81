"""A node as components: containerd, kubelet, kube-proxy, on the first node CoreDNS, with options that work here.

Called by `naru_cluster.cluster`. Makes the node's folders and configuration; starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from naru_cluster import containerd, layout
from naru_cluster.components import Component
from naru_cluster.images import PAUSE_IMAGE
from naru_cluster.layout import NodeLayout
from naru_cluster.machine import CNI_DIR
from naru_cluster.namespaces import Namespaces
from naru_cluster.pki import Pki, node_certificates, write_if_other, write_kubeconfig
from naru_cluster.probe import answers_ok

SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""Machine-wide settings the kubelet would change: it is shown files with these values instead."""


def node_binds(where: NodeLayout) -> dict[Path, str]:
    """What to mount inside a node's namespaces; makes the folders and files that are mounted."""
    binds = where.binds
    for source in binds:
        source.mkdir(parents=True, exist_ok=True)
    for name, value in SYSCTLS.items():
        source = where.folder / "run" / "sysctl" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"{value}\n")
        binds[source] = f"/proc/sys/{name}"
    return binds


def node_components(
    where: NodeLayout, pki: Pki, namespaces: Namespaces, is_node_ready: Callable[[], bool]
) -> list[Component]:
    """The components in the order they start in; writes their configuration files."""
    parts, cluster = where.cluster.parts, where.cluster
    node_certificates(pki, where.name, where.address)
    write_kubeconfig(cluster.inner_kubeconfig(f"node-{where.name}"), cluster.server, pki.folder, f"node-{where.name}")
    for folder in ("containerd", "cni", "run"):
        (where.folder / folder).mkdir(parents=True, exist_ok=True)
    files = {
        "containerd.toml": _containerd(where),
        "cni/10-naru.conflist": json.dumps(_cni(where)),
        "kubelet.json": json.dumps(_kubelet(where, pki)),
        "kube-proxy.json": json.dumps(_kube_proxy(where)),
        "Corefile": _corefile(where),
    }
    for name, text in files.items():
        write_if_other(where.folder / name, text)

    def component(name: str, arguments: list[str], is_ready: Callable[[], bool]) -> Component:
        return Component(where.component(name), namespaces, tuple(arguments), is_ready)

    def probe(url: str) -> bool:
        return namespaces.call(answers_ok, url)

    kubelet = [
        parts.path("kubelet"),
        f"--config={where.folder / 'kubelet.json'}",
        f"--kubeconfig={cluster.inner_kubeconfig(f'node-{where.name}')}",
        f"--hostname-override={where.name}",
        f"--node-ip={where.address}",
        f"--cert-dir={where.folder / 'run'}",
        "--v=2",
    ]
    proxy = [parts.path("kube-proxy"), f"--config={where.folder / 'kube-proxy.json'}", "--v=1"]
    runtime = ["containerd", "-c", str(where.folder / "containerd.toml")]
    components = [
        component("containerd", runtime, lambda: containerd.answers(where)),
        component("kubelet", kubelet, lambda: probe("http://127.0.0.1:10248/healthz") and is_node_ready()),
        component("kube-proxy", proxy, lambda: probe("http://127.0.0.1:10256/healthz")),
    ]
    if where.name == layout.FIRST_NODE:
        coredns = [parts.path("coredns"), "-conf", str(where.folder / "Corefile")]
        components.append(component("coredns", coredns, lambda: probe("http://127.0.0.1:8181/ready")))
    return components


def _containerd(where: NodeLayout) -> str:
    unwanted = ["snapshotter.v1.btrfs", "snapshotter.v1.zfs", "snapshotter.v1.devmapper", "snapshotter.v1.aufs"]
    disabled = [f"io.containerd.{plugin}" for plugin in (*unwanted, "internal.v1.opt")]
    return f"""\
version = 2
root = "{where.folder}/containerd/root"
state = "{where.folder}/containerd/state"
disabled_plugins = {json.dumps(disabled)}
[grpc]
  address = "{where.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # A machine without CAP_SYS_RESOURCE cannot lower the score: no sandbox would start.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_DIR}"
    conf_dir = "{where.folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def _cni(where: NodeLayout) -> dict[str, Any]:
    ipam = {
        "type": "host-local",
        "ranges": [[{"subnet": where.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(where.folder / "run" / "ipam"),
    }
    # Point to point: all traffic of pods is routed, so Services between pods need no netfilter on bridges.
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": ipam},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return {"cniVersion": "0.4.0", "name": "naru", "plugins": plugins}


def _kubelet(where: NodeLayout, pki: Pki) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki.file(f"kubelet-{where.name}.crt"),
        "tlsPrivateKeyFile": pki.file(f"kubelet-{where.name}.key"),
        "containerRuntimeEndpoint": f"unix://{where.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{where.cgroup}",  # a second kubelet would take the pods of the first for orphans
        "failSwapOn": False,
        "failCgroupV1": False,
        "enforceNodeAllocatable": [],
        "resolvConf": "",
        "clusterDomain": layout.CLUSTER_DOMAIN,
        "clusterDNS": [layout.DNS_SERVICE],
        "evictionHard": {
            "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%"
        },
        # Images cannot be pulled a second time.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": "5s",
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "syncFrequency": "10s",
        "maxPods": 110,
    }  # fmt: skip


def _kube_proxy(where: NodeLayout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(where.cluster.inner_kubeconfig("kube-proxy"))},
        "clusterCIDR": layout.POD_RANGE,
        "hostnameOverride": where.name,
        "bindAddress": where.address,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "nodePortAddresses": ["primary"],
        "nftables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
        # Zero leaves the machine's connection tracking as it is.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _corefile(where: NodeLayout) -> str:
    kubeconfig = where.cluster.inner_kubeconfig("admin")
    # Two blocks: in one, the template would answer before the cluster's own names are looked up.
    return f"""\
{layout.CLUSTER_DOMAIN}:5353 in-addr.arpa:5353 ip6.arpa:5353 {{
  bind {where.address}
  errors
  ready 127.0.0.1:8181
  kubernetes {layout.CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {kubeconfig} naru
    pods insecure
    ttl 5
  }}
  cache 5
}}
.:5353 {{
  bind {where.address}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""
