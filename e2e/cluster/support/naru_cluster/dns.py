"""The Service by which pods find CoreDNS, which runs as a process of the first node and not as a pod."""

from __future__ import annotations

from typing import Any

from naru_cluster import layout

_PORT = 5353


def dns_objects() -> list[dict[str, Any]]:
    """The Service and its one endpoint."""
    name, namespace = "kube-dns", "kube-system"
    protocols = (("dns", "UDP"), ("dns-tcp", "TCP"))
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "namespace": namespace, "labels": {"k8s-app": name}},
            "spec": {
                "clusterIP": layout.DNS_SERVICE,
                "ports": [
                    {"name": port, "port": 53, "protocol": protocol, "targetPort": _PORT}
                    for port, protocol in protocols
                ],
            },
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-node",
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "ports": [{"name": port, "port": _PORT, "protocol": protocol} for port, protocol in protocols],
            "endpoints": [{"addresses": [layout.node_address(0)], "conditions": {"ready": True}}],
        },
    ]
