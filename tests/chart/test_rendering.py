"""What the chart makes: the same at every rendering, in the namespace it is told, under names that fit and differ."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import yaml
from helm_chart import (
    ALL_VALUES,
    CHART,
    CLUSTER_SCOPED,
    ROOT,
    all_values,
    find,
    identity,
    pod_specs,
    render,
    render_text,
    run_helm,
    workload,
)

PLAIN: dict[str, Any] = {}
CLUSTER_WIDE = {"watchNamespaces": ["*"]}
LONG = "serving-of-very-many-language-models-for-the-whole-co"


@pytest.mark.parametrize("extra", [[], ["-f", str(ALL_VALUES)]], ids=["defaults", "everything on"])
def test_lint_finds_nothing(extra: list[str]) -> None:
    assert "0 chart(s) failed" in run_helm(["lint", "--strict", str(CHART), *extra])


def test_defaults_make_operator_routers_and_redis() -> None:
    objects = render()
    assert {workload(objects, name)["metadata"]["name"] for name in ("operator", "router", "redis")} == {
        "naru-operator",
        "naru-router",
        "naru-redis",
    }
    ports = find(objects, "Service", "naru-router")["spec"]["ports"]
    assert [(port["name"], port["port"]) for port in ports] == [("http", 8080), ("grpc", 8081)]
    assert find(objects, "Service", "naru-redis")["spec"]["ports"][0]["port"] == 6379


@pytest.mark.parametrize("values", [PLAIN, all_values(), CLUSTER_WIDE], ids=["defaults", "everything on", "all"])
def test_rendering_again_gives_the_same(values: dict[str, Any]) -> None:
    first = render_text(values)
    again = render_text(values, "--include-crds=false")  # another call, not the remembered one
    assert first == again


def test_every_object_follows_the_namespace_of_the_release() -> None:
    here, there = render_text(PLAIN, namespace="ns-a"), render_text(PLAIN, namespace="ns-b")
    assert here.replace("ns-a", "ns-b") == there
    for item in render(PLAIN, namespace="ns-a"):
        assert item["metadata"]["namespace"] == "ns-a", identity(item)


def test_a_namespaced_installation_needs_no_cluster_wide_right() -> None:
    assert [identity(item) for item in render() if item["kind"] in CLUSTER_SCOPED] == []
    several = render({"watchNamespaces": ["team-a", "team-b"]})
    assert [identity(item) for item in several if item["kind"] in CLUSTER_SCOPED] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [(("naru", "ns-a"), ("naru", "ns-b")), (("a", "ns"), ("b", "ns")), (("b-c", "a"), ("c", "a-b"))],
    ids=["two namespaces", "two names", "names that read alike together"],
)
def test_two_releases_share_no_object(one: tuple[str, str], other: tuple[str, str]) -> None:
    values = {**all_values(), **CLUSTER_WIDE}
    sets = [{identity(item) for item in render(values, release=name, namespace=space)} for name, space in (one, other)]
    assert any(kind in CLUSTER_SCOPED for kind, _, _ in sets[0])
    assert sets[0] & sets[1] == set()


def test_a_long_release_name_fits_everywhere() -> None:
    assert len(LONG) == 53  # the longest that Helm takes
    for item in render({**all_values(), **CLUSTER_WIDE}, release=LONG):
        kind, _, name = identity(item)
        # A StatefulSet's pods carry its name and a hash of eleven characters in a label.
        limit = 253 if kind in CLUSTER_SCOPED else 52 if kind == "StatefulSet" else 63
        assert len(name) <= limit, identity(item)
        assert name[-1].isalnum()
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values()), identity(item)
    names = {identity(item) for item in render(release=LONG)}
    assert names & {identity(item) for item in render(release=LONG[:-1] + "x")} == set()


def test_selectors_find_the_pods_of_their_own_workload_alone() -> None:
    objects = render(all_values())
    makers = [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    for maker in makers:
        wanted = maker["spec"]["selector"]["matchLabels"].items()
        found = [other for other in makers if wanted <= other["spec"]["template"]["metadata"]["labels"].items()]
        assert found == [maker]


def test_a_users_label_cannot_hide_a_pod_from_its_selector() -> None:
    objects = render({"router": {"podLabels": {"app.kubernetes.io/component": "other"}}})
    labels = workload(objects, "router")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "router"


def test_labels_of_several_sources_meet_without_harm() -> None:
    common = {"release": "common", "app.kubernetes.io/part-of": "mine"}
    monitor = {"enabled": True, "labels": {"release": "prometheus"}}
    labels = find(
        render({"commonLabels": common, "metrics": {"serviceMonitor": monitor}}), "ServiceMonitor", "naru-router"
    )["metadata"]["labels"]
    assert (labels["release"], labels["app.kubernetes.io/part-of"]) == ("prometheus", "naru")


def test_every_pod_keeps_to_the_restricted_standard() -> None:
    specs = list(pod_specs(render(all_values())))
    assert len(specs) == 6
    for where, spec in specs:
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, where
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert not any(spec.get(word) for word in ("hostNetwork", "hostPID", "hostIPC")), where
        assert all(set(volume) & {"configMap", "secret", "emptyDir"} for volume in spec.get("volumes", ())), where
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, where
            assert security["capabilities"] == {"drop": ["ALL"]}, where
            assert security["readOnlyRootFilesystem"] is True, where


def test_only_what_asks_the_api_server_has_a_token() -> None:
    with_token = {where for where, spec in pod_specs(render(all_values())) if spec["automountServiceAccountToken"]}
    assert with_token == {"Deployment/naru-operator", "Job/naru-apply-crds", "Job/naru-make-secret"}


def test_a_router_drains_before_it_is_killed_and_endpoints_go_first() -> None:
    spec = workload(render({"router": {"drainTimeoutSeconds": 120, "preStopSeconds": 7}}), "router")["spec"]
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 7}}}
    assert pod["terminationGracePeriodSeconds"] > 120 + 7
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_probes_are_patient() -> None:
    for component in ("operator", "router", "redis"):
        container = workload(render(), component)["spec"]["template"]["spec"]["containers"][0]
        for name in ("startup", "liveness", "readiness"):
            probe = container[f"{name}Probe"]
            assert probe["timeoutSeconds"] >= 5, (component, name)
            assert probe["failureThreshold"] >= 3, (component, name)


def test_an_autoscaler_and_the_deployment_do_not_both_say_how_many() -> None:
    scaled = render({"router": {"autoscaling": {"enabled": True}}})
    assert "replicas" not in workload(scaled, "router")["spec"]
    assert find(scaled, "HorizontalPodAutoscaler", "naru-router")["spec"]["minReplicas"] == 2
    assert workload(render(), "router")["spec"]["replicas"] == 2


def test_a_budget_never_forbids_the_last_pod_to_go() -> None:
    single = render({"operator": {"replicas": 1}, "router": {"replicas": 1}})
    assert [item for item in single if item["kind"] == "PodDisruptionBudget"] == []
    several = render({"operator": {"replicas": 2}, "router": {"replicas": 3}})
    assert len([item for item in several if item["kind"] == "PodDisruptionBudget"]) == 2


def test_the_charts_pool_and_the_examples_do_not_meet() -> None:
    """Both would be written by two: Helm and `kubectl apply`."""
    example = {
        (document["kind"], document["metadata"]["name"])
        for document in yaml.safe_load_all((ROOT / "examples" / "smollm2.yaml").read_text(encoding="utf-8"))
    }
    assert ("WorkerPool", "default") in example
    assert not any(item["kind"] == "WorkerPool" for item in render())
    made = render({"workerPool": {"create": True}})
    assert ("WorkerPool", "naru") in {(item["kind"], item["metadata"]["name"]) for item in made}


def test_a_pool_goes_where_it_is_watched() -> None:
    pools = [
        find(render({"watchNamespaces": spaces, "workerPool": {"create": True}}), "WorkerPool", "naru")["metadata"]
        for spaces in ([], ["team-a", "team-b"], ["team-a", "ns-a"], ["*"])
    ]
    assert [pool["namespace"] for pool in pools] == ["ns-a", "team-a", "ns-a", "ns-a"]


def test_versions_follow_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]


def test_the_definitions_come_with_the_chart() -> None:
    shown = [document for document in yaml.safe_load_all(run_helm(["show", "crds", str(CHART)])) if document]
    kept = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    assert len(kept) == 2
    assert sorted(shown, key=lambda crd: str(crd["metadata"]["name"])) == kept


def test_examples_of_a_cluster_are_valid_and_apart_from_those_of_one_machine() -> None:
    from naru_proto.crd.manifests import load_manifests

    files = sorted((ROOT / "examples" / "cluster").glob("*.yaml"))
    assert len(files) >= 4
    documents = [document for path in files for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    assert len(load_manifests(documents)) == len(documents)
    assert [path.name for path in (ROOT / "examples").glob("*.yaml")] == ["smollm2.yaml"]
