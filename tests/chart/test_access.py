"""Who may do what: the operator's rights, verb by verb, and who may call whom over the network."""

from __future__ import annotations

from typing import Any

import pytest
from helm_chart import all_values, find, render

OPERATOR = {
    ("serving.naru.dev", "modeldeployments"): "get list watch",
    ("serving.naru.dev", "workerpools"): "get list watch",
    ("serving.naru.dev", "modeldeployments/status"): "patch",
    ("serving.naru.dev", "workerpools/status"): "patch",
    ("", "pods"): "create delete get list watch",
    ("", "persistentvolumeclaims"): "create get list patch watch",
    ("apps", "controllerrevisions"): "create delete get list watch",
    ("policy", "poddisruptionbudgets"): "create patch",
    ("events.k8s.io", "events"): "create",
}
WORKERS = {
    "matchLabels": {"app.kubernetes.io/managed-by": "naru-operator"},
    "matchExpressions": [{"key": "serving.naru.dev/pool", "operator": "Exists"}],
}


def rights(role: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (group, resource): " ".join(sorted(rule["verbs"]))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_operator_has_these_rights_in_its_namespace_and_no_others() -> None:
    objects = render()
    assert rights(find(objects, "Role", "naru-operator")) == OPERATOR
    lease = find(objects, "Role", "naru-operator-lease")["rules"]
    assert lease == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": ["naru-operator"],
            "verbs": ["get", "update"],
        },
    ]
    bound = [
        (item["metadata"]["name"], item["roleRef"]["name"])
        for item in objects
        if item["kind"] == "RoleBinding" and item["subjects"][0]["name"] == "naru-operator"
    ]
    assert sorted(bound) == [("naru-operator", "naru-operator"), ("naru-operator-lease", "naru-operator-lease")]


def test_each_watched_namespace_has_a_role_for_the_one_operator() -> None:
    objects = render({"watchNamespaces": ["team-a", "team-b"]})
    roles = [item for item in objects if item["kind"] == "Role" and item["metadata"]["name"] == "naru-operator"]
    assert {role["metadata"]["namespace"]: rights(role) for role in roles} == {"team-a": OPERATOR, "team-b": OPERATOR}
    bindings = [
        item for item in objects if item["kind"] == "RoleBinding" and item["metadata"]["name"] == "naru-operator"
    ]
    subject = {"kind": "ServiceAccount", "name": "naru-operator", "namespace": "ns-a"}
    assert [binding["subjects"] for binding in bindings] == [[subject], [subject]]
    leases = [item for item in objects if item["metadata"]["name"] == "naru-operator-lease"]
    assert {item["metadata"]["namespace"] for item in leases} == {"ns-a"}


@pytest.mark.parametrize(
    ("values", "may_read"),
    [
        ({}, False),
        ({"watchNamespaces": ["*"]}, True),
        ({"rbac": {"nodes": "always"}}, True),
        ({"watchNamespaces": ["*"], "rbac": {"nodes": "never"}}, False),
    ],
    ids=["one namespace", "all namespaces", "always", "never"],
)
def test_nodes_are_read_one_by_one_where_that_is_allowed(values: dict[str, Any], may_read: bool) -> None:
    found = [item for item in render(values) if item["metadata"]["name"] == "naru:ns-a:naru:operator-nodes"]
    assert [item["kind"] for item in found] == (["ClusterRole", "ClusterRoleBinding"] if may_read else [])
    if may_read:
        assert rights(found[0]) == {("", "nodes"): "get"}
        assert found[1]["subjects"] == [{"kind": "ServiceAccount", "name": "naru-operator", "namespace": "ns-a"}]


def test_all_namespaces_take_one_cluster_role() -> None:
    objects = render({"watchNamespaces": ["*"]})
    assert rights(find(objects, "ClusterRole", "naru:ns-a:naru:operator")) == OPERATOR
    binding = find(objects, "ClusterRoleBinding", "naru:ns-a:naru:operator")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "naru-operator", "namespace": "ns-a"}]
    assert not any(item["kind"] == "Role" and item["metadata"]["name"] == "naru-operator" for item in objects)


@pytest.mark.parametrize("values", [{}, all_values(), {"watchNamespaces": ["*"]}], ids=["defaults", "on", "all"])
def test_no_wildcard_and_no_reading_of_secrets(values: dict[str, Any]) -> None:
    for role in (item for item in render(values) if item["kind"] in ("Role", "ClusterRole")):
        for rule in role["rules"]:
            assert "*" not in rule["verbs"] + rule["apiGroups"] + rule["resources"], role["metadata"]
            if "secrets" in rule["resources"]:
                assert role["metadata"]["annotations"]["helm.sh/hook-delete-policy"].endswith("hook-succeeded")
                assert rule["verbs"] == ["create"] or rule["resourceNames"] == ["naru-redis"]
                assert not {"list", "watch", "delete"} & set(rule["verbs"])


def test_the_job_for_definitions_may_touch_ours_alone() -> None:
    rules = find(render({"crds": {"upgrade": True}}), "ClusterRole", "naru:ns-a:naru:apply-crds")["rules"]
    assert rules == [
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": ["modeldeployments.serving.naru.dev", "workerpools.serving.naru.dev"],
            "verbs": ["get", "create", "patch"],
        }
    ]


def test_no_account_mounts_a_token_unasked() -> None:
    accounts = [item for item in render(all_values()) if item["kind"] == "ServiceAccount"]
    assert len(accounts) >= 5
    assert all(account["automountServiceAccountToken"] is False for account in accounts)


def test_a_worker_is_called_by_routers_the_operator_and_readers_of_metrics_alone() -> None:
    policy = find(render(), "NetworkPolicy", "naru-worker")["spec"]
    assert policy["podSelector"] == WORKERS
    assert policy["policyTypes"] == ["Ingress"]
    serving, metrics = policy["ingress"]
    assert [port["port"] for port in serving["ports"]] == [9090]
    assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in serving["from"]] == [
        "router",
        "operator",
    ]
    assert all(
        peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "ns-a"}}
        for peer in serving["from"]
    )
    assert [port["port"] for port in metrics["ports"]] == [9091]
    assert metrics["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["monitoring"]


def test_redis_is_called_by_naru_alone() -> None:
    policy = find(render({"watchNamespaces": ["team-a"]}), "NetworkPolicy", "naru-redis")["spec"]
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [6379]
    assert rule["from"][2]["podSelector"] == WORKERS
    assert rule["from"][2]["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    everywhere = find(render({"watchNamespaces": ["*"]}), "NetworkPolicy", "naru-redis")["spec"]
    assert everywhere["ingress"][0]["from"][2]["namespaceSelector"] == {}


def test_only_readers_of_metrics_call_the_operator() -> None:
    policy = find(render(), "NetworkPolicy", "naru-operator")["spec"]
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [8082]
    assert rule["from"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["monitoring"]
    closed = find(render({"networkPolicy": {"metricsNamespaces": []}}), "NetworkPolicy", "naru-operator")["spec"]
    assert closed["policyTypes"] == ["Ingress"]
    assert "ingress" not in closed


def test_callers_of_routers_and_egress_of_workers_can_be_narrowed() -> None:
    assert "from" not in find(render(), "NetworkPolicy", "naru-router")["spec"]["ingress"][0]
    objects = render({**all_values(), "watchNamespaces": []})
    from_ = find(objects, "NetworkPolicy", "naru-router")["spec"]["ingress"][0]["from"]
    assert from_[0] == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
    assert from_[1]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    worker = find(objects, "NetworkPolicy", "naru-worker")["spec"]
    assert worker["policyTypes"] == ["Ingress", "Egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in worker["egress"]] == [[53, 53], [6379], [443]]


def test_policies_can_be_switched_off() -> None:
    objects = render({"networkPolicy": {"enabled": False}})
    assert not any(item["kind"] == "NetworkPolicy" for item in objects)
