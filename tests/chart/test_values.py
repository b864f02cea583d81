"""Every value reaches what it speaks of, unknown ones are refused, and contradictions say what to do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from types import ModuleType
from typing import Any

import pytest
import yaml
from helm_chart import CHART, ROOT, WORKLOADS, RenderError, find, render, workload


def printer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("print_chart", ROOT / "docs" / "print_chart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def markers(component: str) -> dict[str, Any]:
    """One text that stands nowhere else for each value of a workload."""
    return {
        "image": {
            "repository": f"{component}-m-image",
            "digest": "sha256:" + "ab" * 32,
            "pullPolicy": "Always",
        },
        "imagePullSecrets": [{"name": f"{component}-m-pull"}],
        "resources": {"requests": {f"m.example/{component}": "3"}, "limits": {"memory": "77Mi"}},
        "podLabels": {"m-label": f"{component}-m-label"},
        "podAnnotations": {"m-annotation": f"{component}-m-annotation"},
        "nodeSelector": {"m-node": f"{component}-m-node"},
        "tolerations": [{"key": f"{component}-m-toleration", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": f"{component}-m-affinity", "operator": "Exists"}]}
                    ]
                }
            }
        },
        "topologySpreadConstraints": [
            {"maxSkew": 3, "topologyKey": f"{component}-m-spread", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": f"{component}-m-priority",
        "extraEnv": [{"name": "M_ENV", "value": f"{component}-m-env"}],
        "extraVolumes": [{"name": f"{component}-m-volume", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": f"{component}-m-volume", "mountPath": f"/{component}-m-mount"}],
        "terminationGracePeriodSeconds": 1234,
        "probes": {
            name: {"periodSeconds": 91 + index} for index, name in enumerate(("startup", "liveness", "readiness"))
        },
        "podSecurityContext": {"supplementalGroups": [4321]},
        "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
    }


def check_pod(component: str, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    """Each marker stands where Kubernetes reads it."""
    (container,) = spec["containers"]
    assert container["image"] == f"{component}-m-image@sha256:{'ab' * 32}"
    assert container["imagePullPolicy"] == "Always"
    assert spec["imagePullSecrets"] == [{"name": f"{component}-m-pull"}]
    assert container["resources"]["requests"][f"m.example/{component}"] == "3"
    assert container["resources"]["limits"]["memory"] == "77Mi"
    assert metadata["labels"]["m-label"] == f"{component}-m-label"
    assert metadata["annotations"]["m-annotation"] == f"{component}-m-annotation"
    assert spec["nodeSelector"] == {"m-node": f"{component}-m-node"}
    assert {"key": f"{component}-m-toleration", "operator": "Exists"} in spec["tolerations"]
    assert f"{component}-m-affinity" in json.dumps(spec["affinity"]["nodeAffinity"])
    assert [item["topologyKey"] for item in spec["topologySpreadConstraints"]] == [f"{component}-m-spread"]
    assert spec["priorityClassName"] == f"{component}-m-priority"
    assert {"name": "M_ENV", "value": f"{component}-m-env"} in container["env"]
    assert {"name": f"{component}-m-volume", "emptyDir": {}} in spec["volumes"]
    assert f"/{component}-m-mount" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert spec["terminationGracePeriodSeconds"] == 1234
    periods = [container[f"{name}Probe"]["periodSeconds"] for name in ("startup", "liveness", "readiness")]
    assert periods == [91, 92, 93]
    assert spec["securityContext"]["supplementalGroups"] == [4321]
    assert container["securityContext"]["capabilities"]["add"] == ["NET_BIND_SERVICE"]


@pytest.mark.parametrize("component", WORKLOADS)
def test_each_value_of_a_workload_reaches_its_pods_and_no_others(component: str) -> None:
    objects = render({component: markers(component)})
    template = workload(objects, component)["spec"]["template"]
    check_pod(component, template["metadata"], template["spec"])
    for other in WORKLOADS:
        if other != component:
            assert "-m-" not in json.dumps(workload(objects, other))


def test_each_value_of_workers_reaches_the_pods_that_the_operator_makes() -> None:
    from naru_operator.core.pools.model import PodSettings
    from naru_operator.core.pools.pod_manifest import worker_pod
    from naru_operator.core.pools.pod_template import FIELDS, check_template
    from naru_proto.crd.v1alpha1 import WorkerPool

    objects = render({"worker": {**markers("worker"), "runtimeClassName": "worker-m-runtime"}})
    template = yaml.safe_load(find(objects, "ConfigMap", "naru-operator")["data"]["worker-template.yaml"])
    check_template(template)
    assert set(template) == set(FIELDS), "everything that a template knows can be set by values"
    env = operator_env(objects)
    settings = PodSettings(
        image=env["NARU_OPERATOR_WORKER_IMAGE"],
        redis_secret=env["NARU_OPERATOR_WORKER_REDIS_SECRET"],
        service_account=env["NARU_OPERATOR_WORKER_SERVICE_ACCOUNT"],
        image_pull_policy=env["NARU_OPERATOR_WORKER_IMAGE_PULL_POLICY"],
        template=template,
    )
    raw = {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "WorkerPool",
        "metadata": {"name": "p", "namespace": "ns-a", "uid": "u"},
    }
    pod = worker_pod(WorkerPool.model_validate(raw), raw, 0, settings)
    check_pod("worker", pod["metadata"], pod["spec"])
    assert pod["spec"]["serviceAccountName"] == "naru-worker"
    assert pod["spec"]["runtimeClassName"] == "worker-m-runtime"


def operator_env(objects: list[dict[str, Any]]) -> dict[str, str]:
    container = workload(objects, "operator")["spec"]["template"]["spec"]["containers"][0]
    return {item["name"]: item.get("value", "") for item in container["env"]}


def test_workers_log_level_and_general_pull_secrets_reach_them() -> None:
    objects = render({"imagePullSecrets": [{"name": "all"}], "worker": {"logLevel": "debug"}})
    template = yaml.safe_load(find(objects, "ConfigMap", "naru-operator")["data"]["worker-template.yaml"])
    assert template["imagePullSecrets"] == [{"name": "all"}]
    assert {"name": "NARU_WORKER_LOG_LEVEL", "value": "debug"} in template["env"]
    for component in WORKLOADS:
        assert workload(objects, component)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "all"}]


def test_the_registry_goes_before_narus_own_images() -> None:
    objects = render({"imageRegistry": "registry.example.com/naru/"})
    images = {name: workload(objects, name)["spec"]["template"]["spec"]["containers"][0]["image"] for name in WORKLOADS}
    assert images["operator"].startswith("registry.example.com/naru/naru-operator:")
    assert images["router"].startswith("registry.example.com/naru/naru-router:")
    assert images["redis"].startswith("docker.io/library/redis:")
    assert operator_env(objects)["NARU_OPERATOR_WORKER_IMAGE"].startswith("registry.example.com/naru/naru-worker:")


def test_the_routers_settings_are_taken_by_the_router() -> None:
    from naru_router.settings import load_settings

    values = {"settings": {"max_body_bytes": 16777216, "load_factor": 1.5}, "logLevel": "warning"}
    container = workload(render({"router": values}), "router")["spec"]["template"]["spec"]["containers"][0]
    env = {item["name"]: item.get("value", "redis://redis:6379/0") for item in container["env"]}
    settings = load_settings([], env)
    assert (settings.host, settings.http_port, settings.grpc_port) == ("0.0.0.0", 8080, 8081)
    assert (settings.max_body_bytes, settings.load_factor, settings.log_level) == (16777216, 1.5, "warning")
    assert settings.drain_timeout_s == 30


def test_tenants_come_from_a_secret_that_is_mounted_as_a_folder() -> None:
    def pod(values: dict[str, Any]) -> dict[str, Any]:
        spec: dict[str, Any] = workload(render({"router": values}), "router")["spec"]["template"]["spec"]
        return spec

    plain, with_tenants = pod({}), pod({"tenants": {"existingSecret": "who", "key": "t.json"}})
    assert "tenants" not in str(plain)
    env = {item["name"]: item.get("value") for item in with_tenants["containers"][0]["env"]}
    assert env["NARU_ROUTER_TENANTS_FILE"] == "/etc/naru/tenants/t.json"
    assert {"name": "tenants", "secret": {"secretName": "who"}} in with_tenants["volumes"]
    mounts = with_tenants["containers"][0]["volumeMounts"]
    assert {"name": "tenants", "mountPath": "/etc/naru/tenants", "readOnly": True} in mounts


def test_files_go_to_a_claim_that_all_routers_mount() -> None:
    def pod(values: dict[str, Any]) -> dict[str, Any]:
        spec: dict[str, Any] = workload(render({"router": values}), "router")["spec"]["template"]["spec"]
        return spec

    plain, with_files = pod({}), pod({"files": {"existingClaim": "shared"}})
    assert "NARU_ROUTER_FILES_DIR" not in str(plain)
    env = {item["name"]: item.get("value") for item in with_files["containers"][0]["env"]}
    assert {"name": "files", "persistentVolumeClaim": {"claimName": "shared"}} in with_files["volumes"]
    mounts = with_files["containers"][0]["volumeMounts"]
    assert {"name": "files", "mountPath": env["NARU_ROUTER_FILES_DIR"]} in mounts


def test_the_operators_environment_is_its_settings() -> None:
    from naru_operator.settings import load_settings

    objects = render({"operator": {"settings": {"log_format": "json", "resync_s": 600}}, "watchNamespaces": ["a", "b"]})
    env = operator_env(objects)
    fields = {"NARU_OPERATOR_REDIS_URL": "redis://r:6379/0", "NARU_OPERATOR_NAMESPACE": "ns-a"}
    settings = load_settings([], {**env, **fields})
    assert settings.watched("ns-a") == ("a", "b")
    assert settings.health_address == ("0.0.0.0", 8082)
    assert (settings.log_format, settings.resync_s, settings.leader_election) == ("json", 600, True)
    assert (settings.worker_redis_secret, settings.worker_service_account) == ("naru-redis", "naru-worker")
    known = {f"NARU_OPERATOR_{field.name.upper()}" for field in dataclasses.fields(settings)}
    assert set(env) <= known
    everywhere = operator_env(render({"watchNamespaces": ["*"]}))
    assert load_settings([], {**everywhere, **fields}).watched("ns-a") is None


NESTED = (
    "",
    "crds",
    "rbac",
    "hooks",
    "hooks.resources",
    "operator",
    "operator.settings",
    "operator.image",
    "operator.serviceAccount",
    "operator.probes",
    "operator.probes.liveness",
    "operator.affinity",
    "operator.resources",
    "operator.podDisruptionBudget",
    "router",
    "router.image",
    "router.settings",
    "router.service",
    "router.autoscaling",
    "router.podDisruptionBudget",
    "worker",
    "worker.image",
    "worker.probes",
    "workerPool",
    "workerPool.spec",
    "workerPool.spec.workers",
    "workerPool.spec.template",
    "redis",
    "redis.auth",
    "redis.external",
    "redis.persistence",
    "networkPolicy",
    "networkPolicy.worker",
    "metrics",
    "metrics.prometheusRule",
    "metrics.dashboard",
    "ingress",
    "ingress.tls",
    "gateway",
    "gateway.httpRoute",
    "certificate",
    "certificate.issuerRef",
    "test",
)


def test_unknown_keys_are_refused_by_name_at_every_level() -> None:
    values: dict[str, Any] = {}
    for path in NESTED:
        node = values
        for name in filter(None, path.split(".")):
            node = node.setdefault(name, {})
        node["unknwon" + path.title().replace(".", "")] = 1
    with pytest.raises(RenderError) as caught:
        render(values)
    said = str(caught.value)
    missed = [path for path in NESTED if f"'unknwon{path.title().replace('.', '')}' not allowed" not in said]
    assert missed == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"router": {"terminationGracePeriodSeconds": 20}},
            "router.terminationGracePeriodSeconds is 20; it must be more than preStopSeconds and drainTimeoutSeconds "
            "together (35)",
        ),
        ({"redis": {"enabled": False}}, "set redis.external.existingSecret or redis.external.url"),
        ({"redis": {"external": {"url": "redis://x:1/0"}}}, "set redis.enabled=false to use another Redis"),
        (
            {"redis": {"enabled": False, "external": {"url": "http://x"}}},
            "redis.external.url must begin with redis:// or rediss://",
        ),
        ({"redis": {"auth": {"password": "a", "existingSecret": "b"}}}, "exclude each other: leave one out"),
        ({"watchNamespaces": ["*", "a"]}, '"*" means all, leave the others out'),
        ({"ingress": {"enabled": True, "tls": {"enabled": True}}}, "set ingress.tls.secretName or certificate.enabled"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "name the Gateway that the routes join"),
        ({"certificate": {"enabled": True}}, "certificate.enabled needs certificate.issuerRef"),
        (
            {"certificate": {"enabled": True, "issuerRef": {"name": "x"}}},
            "set certificate.dnsNames, ingress.hosts or gateway.hostnames",
        ),
        (
            {"router": {"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": 0}}},
            "set targetCPUUtilizationPercentage or metrics",
        ),
        ({"operator": {"logLevel": "loud"}}, "/operator/logLevel"),
        ({"operator": {"image": {"digest": "latest"}}}, "/operator/image/digest"),
        ({"router": {"settings": {"redis_url": "x"}}}, "'redis_url' not allowed"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_values_that_cannot_work_are_refused_with_a_remedy(values: dict[str, Any], said: str) -> None:
    with pytest.raises(RenderError) as caught:
        render(values)
    assert said in str(caught.value)


def test_every_value_is_explained() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    documented = {path for path, _ in printer().documented_values(text)}

    def undocumented(node: Any, path: str) -> list[str]:
        if path in documented:
            return []
        if isinstance(node, dict) and node:
            return [found for name, child in node.items() for found in undocumented(child, f"{path}.{name}".strip("."))]
        return [path]

    assert undocumented(yaml.safe_load(text), "") == []
    assert len(documented) > 150


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        return schema["definitions"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node

    def compare(node: dict[str, Any], value: Any, path: str) -> list[str]:
        node = resolve(node)
        if not isinstance(value, dict) or "properties" not in node or not value:
            return []
        here = set(node["properties"]) - {"global"}
        if path.endswith((".resources", ".startup", ".liveness", ".readiness")):
            return []  # Kubernetes' own: a value need not show all fields
        differing = [f"{path}.{name}" for name in here ^ set(value)]
        return differing + [
            found
            for name in here & set(value)
            for found in compare(node["properties"][name], value[name], f"{path}.{name}")
        ]

    assert compare(schema, values, "") == []


def test_what_is_printed_is_fresh() -> None:
    module = printer()
    assert [path.name for path, text in module.printed_files().items() if path.read_text("utf-8") != text] == []
    assert module.main(["--check"]) == 0
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert "| `router.replicas` | `2` | Routers, where autoscaling is off. |" in readme
    stale = readme.replace("| `router.replicas` | `2` |", "| `router.replicas` | `3` |")
    assert module.printed_readme(stale, (CHART / "values.yaml").read_text(encoding="utf-8")) == readme
