"""The chart against a real API server: every object is taken, rights are exactly what is used, upgrades lose nothing.

No pod runs here; the scripts of the chart's jobs run as their service accounts, from this process.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from naru_cluster.api import Completed, KubeCluster

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "naru"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MODELS = "modeldeployments.serving.naru.dev"
POOLS = "workerpools.serving.naru.dev"
FOREIGN = ("monitoring.coreos.com", "gateway.networking.k8s.io", "cert-manager.io")
PASSWORD = ("--set", "redis.auth.password=x")
"""No job then: nothing runs one here."""


def rendered(cluster: KubeCluster, namespace: str, *arguments: str) -> list[dict[str, Any]]:
    """Objects of `helm template`."""
    text = cluster.helm("template", "naru", str(CHART), "-n", namespace, "--kube-version", "1.34.0", *arguments)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture
def credentials(tmp_path: Path, crds: KubeCluster) -> Path:
    """A folder as the kubelet mounts it into pods, still without a token."""
    kubeconfig = yaml.safe_load(crds.kubeconfig.read_text(encoding="utf-8"))
    data = kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(data))
    return tmp_path


def run_job(
    cluster: KubeCluster, objects: list[dict[str, Any]], name: str, credentials: Path, **changed: str
) -> Completed:
    """Runs the script of a job as its service account, with the rights that the chart gives it."""
    rights = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    suffix = name.removeprefix("naru-")
    cluster.apply([item for item in objects if item["kind"] in rights and item["metadata"]["name"].endswith(suffix)])
    (job,) = (item for item in objects if item["kind"] == "Job" and item["metadata"]["name"] == name)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    token = cluster.kubectl("create", "token", name, "-n", job["metadata"]["namespace"])
    (credentials / "token").write_text(token.strip())
    kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text(encoding="utf-8"))
    server = urlsplit(kubeconfig["clusters"][0]["cluster"]["server"])
    env = {
        **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
        **{item["name"]: item["value"] for item in container["env"]},
        "KUBERNETES_SERVICE_HOST": server.hostname or "",
        "KUBERNETES_SERVICE_PORT": str(server.port),
        "CREDENTIALS": str(credentials),
        **changed,
    }
    command = [sys.executable, *container["command"][1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return Completed(done.returncode, done.stdout, done.stderr)


def secret(cluster: KubeCluster, namespace: str) -> dict[str, str]:
    """Texts of the Redis Secret."""
    data = cluster.kubectl_json("get", "secret", "naru-redis", "-n", namespace)["data"]
    return {name: base64.b64decode(text).decode() for name, text in data.items()}


def test_the_api_server_takes_every_object(crds: KubeCluster, namespace: str) -> None:
    values = ("-f", str(CHART / "ci" / "all-values.yaml"), "--set", f"watchNamespaces={{{namespace}}}")
    objects = rendered(crds, namespace, *values)
    known = [item for item in objects if not item["apiVersion"].startswith(FOREIGN)]
    assert len(known) > 35
    # A pod is refused before its account is there.
    crds.apply([item for item in known if item["kind"] == "ServiceAccount"])
    text = "\n---\n".join(json.dumps(item) for item in known)
    done = crds.try_kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert done.rc == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(known)
    assert "would violate PodSecurity" not in done.stderr


def test_install_upgrade_and_uninstall(crds: KubeCluster, namespace: str) -> None:
    crds.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    crds.helm("install", "naru", str(CHART), "-n", namespace, *PASSWORD)
    crds.wait_for(lambda: len(pods(crds, namespace)) >= 4, 30, "operator, two routers and Redis have pods")
    assert "violates PodSecurity" not in crds.kubectl("get", "events", "-n", namespace)
    before = shape(crds, namespace)
    notes = crds.helm("upgrade", "naru", str(CHART), "-n", namespace, *PASSWORD)
    assert "Helm does not upgrade custom resource definitions" in notes
    assert shape(crds, namespace) == before
    crds.helm("upgrade", "naru", str(CHART), "-n", namespace, "--set", "redis.auth.password=y")
    after = shape(crds, namespace)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {"Deployment/naru-operator", "Deployment/naru-router", "StatefulSet/naru-redis"}
    crds.apply(pool("kept"), namespace)
    crds.helm("uninstall", "naru", "-n", namespace, "--wait")
    assert crds.kubectl("get", "wp", "kept", "-n", namespace, "-o", "name").strip() == f"workerpool.{POOLS[12:]}/kept"


def pods(cluster: KubeCluster, namespace: str) -> list[Any]:
    """Pods, which stay pending here."""
    return list(cluster.kubectl_json("get", "pods", "-n", namespace)["items"])


def shape(cluster: KubeCluster, namespace: str) -> dict[str, int]:
    """Generation of everything that restarts pods when it changes."""
    listed = cluster.kubectl_json("get", "deployments,statefulsets", "-n", namespace)["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["generation"] for item in listed}


def pool(name: str, **spec: Any) -> dict[str, Any]:
    """A WorkerPool."""
    return {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "WorkerPool",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_the_job_makes_the_password_once_and_anew_when_asked(
    crds: KubeCluster, namespace: str, credentials: Path
) -> None:
    other = f"{namespace}-b"
    crds.kubectl("create", "namespace", other)
    try:
        watched = ("--set", f"watchNamespaces={{{namespace},{other}}}")
        objects = rendered(crds, namespace, *watched)
        done = run_job(crds, objects, "naru-make-secret", credentials)
        assert done.rc == 0, done.stderr
        first = secret(crds, namespace)
        assert first["url"] == f"redis://:{first['password']}@naru-redis.{namespace}.svc.cluster.local:6379/0"
        assert len(first["password"]) >= 40
        assert secret(crds, other) == {"url": first["url"]}

        assert run_job(crds, objects, "naru-make-secret", credentials).stdout == ""
        assert secret(crds, namespace) == first
        rotated = rendered(crds, namespace, *watched, "--set", "redis.auth.rotation=2")
        done = run_job(crds, rotated, "naru-make-secret", credentials)
        assert first["password"] not in done.stdout + done.stderr
        second = secret(crds, namespace)
        assert second["password"] != first["password"]
        assert secret(crds, other) == {"url": second["url"]}
        crds.kubectl("delete", "secret", "naru-redis", "-n", other)
        assert run_job(crds, rotated, "naru-make-secret", credentials).rc == 0
        assert secret(crds, other) == {"url": second["url"]}
    finally:
        crds.kubectl("delete", "namespace", other, "--wait=false")


def test_the_job_leaves_a_strangers_secret_and_says_what_to_do(
    crds: KubeCluster, namespace: str, credentials: Path
) -> None:
    crds.kubectl("create", "secret", "generic", "naru-redis", "-n", namespace, "--from-literal=url=redis://mine:1/0")
    done = run_job(crds, rendered(crds, namespace), "naru-make-secret", credentials)
    assert done.rc == 1
    assert f"Secret {namespace}/naru-redis has no key 'password': delete it, or set redis.auth.existingSecret" in (
        done.stderr
    )
    assert secret(crds, namespace) == {"url": "redis://mine:1/0"}


def test_the_job_may_read_no_other_secret(crds: KubeCluster, namespace: str, credentials: Path) -> None:
    crds.kubectl("create", "secret", "generic", "theirs", "-n", namespace, "--from-literal=key=value")
    done = run_job(crds, rendered(crds, namespace), "naru-make-secret", credentials, SECRET_NAME="theirs")
    assert done.rc == 1
    assert "403" in done.stderr


@pytest.fixture
def old_definitions(crds: KubeCluster) -> Iterator[None]:
    """Definitions of an earlier time: pools know no `moveTimeout` yet. Today's are back afterwards."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in (CHART / "crds").glob("*.yaml")}
    old = yaml.safe_load(files["workerpools"])
    del fields(old)["spec"]["properties"]["moveTimeout"]
    replace(crds, old)
    yield
    for text in files.values():
        replace(crds, yaml.safe_load(text))


def fields(crd: dict[str, Any]) -> dict[str, Any]:
    """Top-level fields of a definition's only version."""
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return found


def replace(cluster: KubeCluster, crd: dict[str, Any]) -> None:
    """Puts a definition in place of the cluster's, fields that it lacks included."""
    path = f"{CRDS}/{crd['metadata']['name']}"
    found = cluster.api.get(path).json()
    body = {**found, "spec": {**found["spec"], "versions": copy.deepcopy(crd["spec"]["versions"])}}
    cluster.api.put(path, json=body).raise_for_status()


def takes_the_new_field(cluster: KubeCluster, namespace: str) -> bool:
    """Whether a pool with the field is taken whole."""
    body = json.dumps(pool("new", moveTimeout="5s"))
    return cluster.try_kubectl("apply", "-n", namespace, "--validate=strict", "-f", "-", stdin=body).rc == 0


def test_the_documented_upgrade_brings_new_fields_and_loses_no_object(
    crds: KubeCluster, namespace: str, old_definitions: None
) -> None:
    crds.wait_for(lambda: not takes_the_new_field(crds, namespace), 20, "the old definitions are served")
    crds.kubectl("delete", "wp", "--all", "-n", namespace)
    crds.helm("install", "naru", str(CHART), "-n", namespace, *PASSWORD)
    crds.apply(pool("old"), namespace)
    assert not takes_the_new_field(crds, namespace)

    definitions = crds.helm("show", "crds", str(CHART))
    crds.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=definitions)
    crds.helm("upgrade", "naru", str(CHART), "-n", namespace, *PASSWORD)
    crds.wait_for(lambda: takes_the_new_field(crds, namespace), 20, "the new field is taken")
    assert crds.kubectl_json("get", "wp", "new", "-n", namespace)["spec"]["moveTimeout"] == "5s"
    crds.helm("uninstall", "naru", "-n", namespace, "--wait")
    names = [item["metadata"]["name"] for item in crds.kubectl_json("get", "wp", "-n", namespace)["items"]]
    assert names == ["new", "old"]


def test_the_job_upgrades_definitions_and_never_cuts_them_down(
    crds: KubeCluster, namespace: str, old_definitions: None, credentials: Path, tmp_path: Path
) -> None:
    objects = rendered(crds, namespace, "--set", "crds.upgrade=true", *PASSWORD)
    (data,) = (
        item["data"] for item in objects if item["kind"] == "ConfigMap" and "apply-crds" in item["metadata"]["name"]
    )
    folder = tmp_path / "crds"
    folder.mkdir()
    for name, text in data.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = run_job(crds, objects, "naru-apply-crds", credentials, CRD_FOLDER=str(folder))
    assert done.rc == 0, done.stderr
    assert done.stdout.splitlines() == [f"{MODELS} was applied", f"{POOLS} was applied"]
    crds.wait_for(lambda: takes_the_new_field(crds, namespace), 20, "the new field is taken")

    newer = yaml.safe_load((CHART / "crds" / "workerpools.yaml").read_text(encoding="utf-8"))
    fields(newer)["spec"]["properties"]["later"] = {"type": "string"}
    replace(crds, newer)
    done = run_job(crds, objects, "naru-apply-crds", credentials, CRD_FOLDER=str(folder))
    assert done.rc == 0, done.stderr
    assert (
        f"{POOLS} is left alone: the cluster's has fields that this chart's lacks: v1alpha1.spec.later" in done.stdout
    )
    assert "later" in fields(crds.api.get(f"{CRDS}/{POOLS}").json())["spec"]["properties"]
    crds.kubectl("delete", "clusterrole,clusterrolebinding", f"naru:{namespace}:naru:apply-crds")


@pytest.mark.parametrize(
    ("verb", "resource", "is_allowed"),
    [
        ("list", "workerpools.serving.naru.dev", True),
        ("patch", "modeldeployments.serving.naru.dev/status", True),
        ("delete", "pods", True),
        ("update", "leases.coordination.k8s.io/naru-operator", True),
        ("create", "events.events.k8s.io", True),
        ("patch", "modeldeployments.serving.naru.dev", False),
        ("get", "secrets", False),
        ("list", "secrets", False),
        ("create", "pods/exec", False),
        ("update", "leases.coordination.k8s.io/other", False),
        ("list", "nodes", False),
        ("get", "customresourcedefinitions.apiextensions.k8s.io", False),
    ],
)
def test_the_operators_account_may(
    crds: KubeCluster, installed_rights: str, verb: str, resource: str, is_allowed: bool
) -> None:
    assert may(crds, installed_rights, verb, resource, installed_rights) is is_allowed


def test_the_operators_account_may_nothing_elsewhere(crds: KubeCluster, installed_rights: str) -> None:
    for verb, resource in (("list", "pods"), ("list", "workerpools.serving.naru.dev")):
        assert may(crds, installed_rights, verb, resource, "default") is False


@pytest.fixture(scope="module")
def installed_rights(crds: KubeCluster) -> Iterator[str]:
    """A namespace with the chart's accounts and roles."""
    namespace = "naru-rights"
    crds.kubectl("create", "namespace", namespace)
    kinds = ("ServiceAccount", "Role", "RoleBinding")
    crds.apply([item for item in rendered(crds, namespace, *PASSWORD) if item["kind"] in kinds])
    yield namespace
    crds.kubectl("delete", "namespace", namespace, "--wait=false")


def may(cluster: KubeCluster, account_namespace: str, verb: str, resource: str, namespace: str) -> bool:
    """Asks about the operator's account; `resource` is plural.group/subresource, or …/name of a lease."""
    plural, _, rest = resource.partition("/")
    plural, _, group = plural.partition(".")
    kind = "name" if plural == "leases" else "subresource"
    attributes = {"verb": verb, "group": group, "resource": plural, "namespace": namespace, kind: rest}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{account_namespace}:naru-operator",
            "resourceAttributes": attributes,
        },
    }
    answer = cluster.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json=review)
    return bool(answer.raise_for_status().json()["status"]["allowed"])
