"""The control plane as components: etcd, API server, controller manager, scheduler, with the options that work here.

Called by `naru_cluster.cluster`. Writes their configuration; starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from naru_cluster import layout
from naru_cluster.components import Component
from naru_cluster.layout import Layout
from naru_cluster.namespaces import Namespaces
from naru_cluster.pki import Pki, write_if_other, write_kubeconfig
from naru_cluster.probe import answers_ok

CLIENTS = ("admin", "kube-controller-manager", "kube-scheduler", "kube-proxy")

SCHEDULER: dict[str, Any] = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "podInitialBackoffSeconds": 1,
    "podMaxBackoffSeconds": 2,
    "profiles": [
        {
            "schedulerName": "default-scheduler",
            # It pulls against packing: it prefers nodes whose resources are used evenly.
            "plugins": {"multiPoint": {"disabled": [{"name": "NodeResourcesBalancedAllocation"}]}},
            "pluginConfig": [
                {
                    "name": "NodeResourcesFit",
                    "args": {
                        "scoringStrategy": {
                            "type": "MostAllocated",
                            "resources": [
                                {"name": "nvidia.com/gpu", "weight": 10},
                                {"name": "cpu", "weight": 1},
                                {"name": "memory", "weight": 1},
                            ],
                        }
                    },
                }
            ],
        }
    ],
}
"""Fills nodes before it takes another one: GPUs stay free in whole nodes."""


def control_plane(where: Layout, pki: Pki, namespaces: Namespaces) -> list[Component]:
    """The components in the order they start in; writes their configuration files."""
    for client in CLIENTS:
        write_kubeconfig(where.inner_kubeconfig(client), where.server, where.pki, client)
    scheduler = {**SCHEDULER, "clientConnection": {"kubeconfig": str(where.inner_kubeconfig("kube-scheduler"))}}
    scheduler["clientConnection"] |= {"qps": 200, "burst": 400}
    write_if_other(where.folder / "scheduler.json", json.dumps(scheduler))

    def component(name: str, arguments: list[str], is_ready: Callable[[], bool]) -> Component:
        return Component(name, namespaces, (where.parts.path(name), *arguments), is_ready)

    def probe(url: str, client: tuple[str, str] | None = None) -> Callable[[], bool]:
        return lambda: namespaces.call(answers_ok, url, client)

    api_client = (pki.file("admin.crt"), pki.file("admin.key"))
    return [
        component("etcd", _etcd(where), probe("http://127.0.0.1:2379/readyz")),
        component("kube-apiserver", _api_server(where, pki), probe("https://127.0.0.1:6443/readyz", api_client)),
        component("kube-controller-manager", _controllers(where, pki), probe("https://127.0.0.1:10257/healthz")),
        component("kube-scheduler", _scheduler(where), probe("https://127.0.0.1:10259/healthz")),
    ]


def _etcd(where: Layout) -> list[str]:
    peer, client = "http://127.0.0.1:2380", "http://127.0.0.1:2379"
    return [
        f"--data-dir={where.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # the data never outlive the cluster
        "--log-level=warn",
    ]


def _api_server(where: Layout, pki: Pki) -> list[str]:
    return [
        "--etcd-servers=http://127.0.0.1:2379",
        "--secure-port=6443",
        "--bind-address=0.0.0.0",
        f"--advertise-address={layout.node_address(0)}",
        f"--service-cluster-ip-range={layout.SERVICE_RANGE}",
        f"--cert-dir={where.folder / 'run'}",
        f"--tls-cert-file={pki.file('apiserver.crt')}",
        f"--tls-private-key-file={pki.file('apiserver.key')}",
        f"--client-ca-file={pki.ca}",
        f"--service-account-issuer=https://kubernetes.default.svc.{layout.CLUSTER_DOMAIN}",
        f"--service-account-key-file={pki.file('service-account.pub')}",
        f"--service-account-signing-key-file={pki.file('service-account.key')}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki.file('apiserver-kubelet.crt')}",
        f"--kubelet-client-key={pki.file('apiserver-kubelet.key')}",
        f"--kubelet-certificate-authority={pki.ca}",
        # Logs and exec would look node names up in DNS otherwise.
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki.front_proxy.certificate.crt}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki.file('front-proxy-client.crt')}",
        f"--proxy-client-key-file={pki.file('front-proxy-client.key')}",
        "--v=1",
    ]


def _controllers(where: Layout, pki: Pki) -> list[str]:
    kubeconfig = where.inner_kubeconfig("kube-controller-manager")
    return [
        *_kubeconfigs(str(kubeconfig)),
        f"--kubeconfig={kubeconfig}",
        f"--cert-dir={where.folder / 'run'}",
        f"--service-account-private-key-file={pki.file('service-account.key')}",
        f"--root-ca-file={pki.ca}",
        f"--cluster-signing-cert-file={pki.ca}",
        f"--cluster-signing-key-file={pki.authority.certificate.key}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--cluster-cidr={layout.POD_RANGE}",
        "--allocate-node-cidrs=false",  # nodes have fixed ranges, and fake nodes none
        f"--service-cluster-ip-range={layout.SERVICE_RANGE}",
        # With the usual 20 a second the first service account comes seconds later.
        "--kube-api-qps=300",
        "--kube-api-burst=500",
        "--v=1",
    ]


def _scheduler(where: Layout) -> list[str]:
    kubeconfig = where.inner_kubeconfig("kube-scheduler")
    folder = where.folder
    return [
        *_kubeconfigs(str(kubeconfig)),
        f"--config={folder / 'scheduler.json'}",
        f"--cert-dir={folder / 'run'}",
        "--v=1",
    ]


def _kubeconfigs(path: str) -> list[str]:
    return [f"--authentication-kubeconfig={path}", f"--authorization-kubeconfig={path}"]
