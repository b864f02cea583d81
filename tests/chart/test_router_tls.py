"""TLS at the routers: files from a Secret, probes that can look, and who is told of it."""

from __future__ import annotations

from typing import Any

import pytest
from helm_chart import RenderError, find, render, workload

TLS = {"router": {"tls": {"existingSecret": "certs"}}}
MUTUAL = {"router": {"tls": {"existingSecret": "certs", "clientCAKey": "ca.crt"}}}


def container(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The router's container, and its environment by name."""
    (found,) = workload(render(values), "router")["spec"]["template"]["spec"]["containers"]
    return found, {each["name"]: each.get("value", "") for each in found["env"]}


def test_certificate_and_key_come_from_a_secret_that_is_mounted_as_a_folder() -> None:
    found, env = container(TLS)
    assert env["NARU_ROUTER_TLS_CERT_FILE"] == "/etc/naru/tls/tls.crt"
    assert env["NARU_ROUTER_TLS_KEY_FILE"] == "/etc/naru/tls/tls.key"
    assert "NARU_ROUTER_TLS_CLIENT_CA_FILE" not in env
    (mount,) = [each for each in found["volumeMounts"] if each["name"] == "tls"]
    assert mount == {"name": "tls", "mountPath": "/etc/naru/tls", "readOnly": True}
    volumes = workload(render(TLS), "router")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "certs"}} in volumes
    plain, env = container({})
    assert not any("TLS" in name for name in env) and not any(each["name"] == "tls" for each in plain["volumeMounts"])


def test_probes_speak_tls_or_look_at_the_port_where_clients_need_a_certificate() -> None:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        plain, tls, mutual = (container(values)[0][name] for values in ({}, TLS, MUTUAL))
        assert "scheme" not in plain["httpGet"]
        assert tls == {**plain, "httpGet": {**plain["httpGet"], "scheme": "HTTPS"}}
        assert mutual == {**{k: v for k, v in plain.items() if k != "httpGet"}, "tcpSocket": {"port": "http"}}
    assert container(MUTUAL)[1]["NARU_ROUTER_TLS_CLIENT_CA_FILE"] == "/etc/naru/tls/ca.crt"


def test_service_monitor_and_test_know_of_it() -> None:
    monitor = {"metrics": {"serviceMonitor": {"enabled": True, "tlsConfig": {"serverName": "naru"}}}}
    for values, protocols, scheme in (({}, ["http", "kubernetes.io/h2c"], None), (TLS, ["https", "https"], "https")):
        objects = render({**values, **monitor})
        ports = find(objects, "Service", "naru-router")["spec"]["ports"]
        assert [port["appProtocol"] for port in ports] == protocols
        (endpoint,) = find(objects, "ServiceMonitor", "naru-router")["spec"]["endpoints"]
        assert endpoint.get("scheme") == scheme
        assert endpoint.get("tlsConfig") == ({"serverName": "naru"} if scheme else None)
        env = find(objects, "Pod", "naru-test")["spec"]["containers"][0]["env"]
        assert env[0]["value"].startswith(f"{scheme or 'http'}://naru-router.")
    assert not [each for each in render(MUTUAL) if each["kind"] == "Pod"], "it has no certificate to show"


def test_an_authority_without_a_certificate_is_refused() -> None:
    with pytest.raises(RenderError, match=r"router\.tls\.existingSecret"):
        render({"router": {"tls": {"clientCAKey": "ca.crt"}}})
