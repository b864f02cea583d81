"""The pod of a worker, field by field, and that all a pool or an installation may set reaches it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pool_world import SETTINGS, UID, container, make_pool, pod, raw_pool

from naru_operator.core.kube import Object
from naru_operator.core.pools.pod_manifest import pool_objects, slot_claim, worker_pod
from naru_proto import names
from naru_worker.settings import WorkerSettings
from naru_worker.settings_source import read_settings


def env(item: Object) -> dict[str, Any]:
    variables = container(item)["env"]
    assert len({each["name"] for each in variables}) == len(variables)
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in variables}


def worker_settings(item: Object) -> WorkerSettings:
    """What the worker itself makes of its environment, as the kubelet fills it in."""
    filled = {"POD_IP": "10.1.2.3", "NARU_WORKER_ID": item["metadata"]["name"]}
    filled["NARU_WORKER_REDIS_URL"] = "redis://r:6379"
    for name, value in env(item).items():
        if isinstance(value, str):
            filled[name] = value.replace("$(POD_IP)", filled["POD_IP"])
    return read_settings([], filled)


def volumes(item: Object) -> dict[str, tuple[Object, Object]]:
    """By mount path: (volume without its name, mount)."""
    by_name = {volume["name"]: {k: v for k, v in volume.items() if k != "name"} for volume in item["spec"]["volumes"]}
    mounts = container(item)["volumeMounts"]
    assert len(by_name) == len(item["spec"]["volumes"]) == len(mounts)
    return {mount["mountPath"]: (by_name[mount["name"]], mount) for mount in mounts}


def test_metadata_names_pool_slot_and_owner() -> None:
    metadata = pod(slot=3)["metadata"]
    hash_label = metadata["labels"].pop(names.LABEL_TEMPLATE_HASH)
    assert len(hash_label) == 16
    assert metadata == {
        "name": "p-3",
        "namespace": "ns",
        "labels": {
            "app.kubernetes.io/name": "naru",
            "app.kubernetes.io/component": "worker",
            "app.kubernetes.io/managed-by": "naru-operator",
            "serving.naru.dev/pool": "p",
            "serving.naru.dev/slot": "3",
        },
        "annotations": {"serving.naru.dev/pool-name": "p"},
        "ownerReferences": [
            {
                "apiVersion": "serving.naru.dev/v1alpha1",
                "kind": "WorkerPool",
                "name": "p",
                "uid": UID,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def test_an_item_of_a_list_owns_its_pods_though_it_carries_no_kind() -> None:
    raw = {key: value for key, value in raw_pool().items() if key not in ("apiVersion", "kind")}
    assert worker_pod(make_pool(), raw, 0, SETTINGS) == pod()


def test_the_pod_of_a_cpu_pool_keeps_to_pod_security_restricted() -> None:
    spec, worker = pod()["spec"], container(pod())
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    allowed = {
        "emptyDir",
        "persistentVolumeClaim",
        "secret",
        "configMap",
        "projected",
        "downwardAPI",
        "ephemeral",
        "csi",
    }
    assert all(set(volume) <= allowed for volume, _ in volumes(pod()).values())
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert "hostPort" not in json.dumps(spec)


def test_the_rest_of_a_plain_pod_is_what_a_worker_needs_and_no_more() -> None:
    spec, worker = pod()["spec"], container(pod())
    plain = {k: v for k, v in spec.items() if k not in ("containers", "volumes", "securityContext", "affinity")}
    assert plain == {
        "restartPolicy": "Always",
        "serviceAccountName": "default",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 135,
    }
    assert {k: worker[k] for k in ("name", "image", "imagePullPolicy", "terminationMessagePolicy")} == {
        "name": "worker",
        "image": "naru/worker:1",
        "imagePullPolicy": "IfNotPresent",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    assert [(port["name"], port["containerPort"]) for port in worker["ports"]] == [("grpc", 9090), ("metrics", 9091)]
    assert not {"lifecycle", "resources", "command", "args"} & set(worker)


def test_probes_ask_the_grpc_health_and_bear_a_busy_worker() -> None:
    worker = container(pod())
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = worker[name]
        asked = {"port": 9090} if name == "livenessProbe" else {"port": 9090, "service": "ready"}
        assert probe["grpc"] == asked
        assert probe["timeoutSeconds"] >= 5
        assert probe["failureThreshold"] >= 3
    assert worker["startupProbe"]["periodSeconds"] * worker["startupProbe"]["failureThreshold"] >= 600
    assert worker["livenessProbe"]["periodSeconds"] * worker["livenessProbe"]["failureThreshold"] >= 60


def test_the_environment_is_read_by_the_worker_as_it_was_meant() -> None:
    settings = worker_settings(
        pod(
            slot=4,
            memory={"budget": "4Gi", "host": "1Gi", "highWatermark": 0.9, "lowWatermark": 0.5},
            threads=3,
            drainTimeout="90s",
            moveTimeout="1m500ms",
            cache={"size": "100Gi"},
        )
    )
    server, memory, images = settings.server, settings.memory, settings.images
    assert (server.worker_id, settings.registry.pool, settings.registry.redis_url) == ("p-4", "p", "redis://r:6379")
    assert (server.listen, server.advertise) == ("0.0.0.0:9090", "10.1.2.3:9090")
    assert (server.metrics_listen, server.home, server.log_level) == ("0.0.0.0:9091", names.CACHE_DIR, "info")
    assert (server.drain_timeout_s, server.move_timeout_s) == (90.0, 60.5)
    assert (memory.memory_budget_bytes, memory.host_budget_bytes) == (4 << 30, 1 << 30)
    assert (memory.high_watermark, memory.low_watermark, settings.engine.num_threads) == (0.9, 0.5, 3)
    kept = env(pod(cache={"size": "100Gi"}))
    budgets = int(kept["NARU_WORKER_CACHE_BUDGET_BYTES"]), images.image_budget_bytes
    assert budgets == (50 << 30, 45 << 30)
    assert 100 << 30 > sum(budgets), "the kubelet evicts a pod whose cache passes its bound"


def test_what_a_pool_leaves_open_is_the_workers_own_choice() -> None:
    default, ours = WorkerSettings(), worker_settings(pod())
    assert ours.memory == default.memory
    assert (ours.engine, ours.images, ours.residency) == (default.engine, default.images, default.residency)


def test_every_variable_of_ours_is_one_the_worker_knows() -> None:
    from naru_worker.settings_source import knobs

    known = {knob.variable for knob in knobs()}
    spec: dict[str, Any] = {"memory": {"budget": "1Gi", "host": 0}, "threads": 1, "cache": {"size": "1Gi"}}
    given = {name for name in env(pod(**spec)) if name.startswith("NARU_WORKER_")}
    assert given <= known


def test_identity_comes_from_the_downward_api_and_redis_from_its_secret() -> None:
    found = env(pod())
    assert found["NARU_WORKER_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert found["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert found["NARU_WORKER_NODE"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert found["NARU_WORKER_REDIS_URL"] == {"secretKeyRef": {"name": "naru-redis", "key": "url"}}
    order = [each["name"] for each in container(pod())["env"]]
    assert order.index("POD_IP") < order.index("NARU_WORKER_ADVERTISE"), "$(POD_IP) stands only for variables above"


def test_the_pools_variables_beat_the_installations_and_neither_beats_naru() -> None:
    settings = dataclasses.replace(
        SETTINGS,
        env={"A": "settings", "B": "settings", "C": "settings", "NARU_WORKER_POOL": "evil"},
        log_level="debug",
        template={"env": [{"name": "B", "value": "template"}, {"name": "C", "value": "template"}]},
    )
    secret = {"name": "s", "key": "k"}
    pool_env = [
        {"name": "C", "value": "pool"},
        {"name": "D", "secretKey": secret},
        {"name": "NARU_WORKER_REDIS_URL", "value": "redis://evil"},
        {"name": "NARU_WORKER_KV_CACHE_BYTES", "value": "7"},
    ]
    found = env(pod(settings, template={"env": pool_env}))
    assert {name: found[name] for name in "ABCD"} == {
        "A": "settings",
        "B": "template",
        "C": "pool",
        "D": {"secretKeyRef": secret},
    }
    assert (found["NARU_WORKER_POOL"], found["NARU_WORKER_LOG_LEVEL"]) == ("p", "debug")
    assert found["NARU_WORKER_REDIS_URL"] == {"secretKeyRef": {"name": "naru-redis", "key": "url"}}
    assert found["NARU_WORKER_KV_CACHE_BYTES"] == "7"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"size": "20Gi"}, {"emptyDir": {"sizeLimit": "20Gi"}}),
        ({"hostPath": "/data/naru"}, {"hostPath": {"path": "/data/naru", "type": "DirectoryOrCreate"}}),
    ],
)
def test_the_cache_lies_where_the_pool_says(cache: dict[str, str], volume: Object) -> None:
    assert volumes(pod(cache=cache))[names.CACHE_DIR] == (volume, {"name": "cache", "mountPath": names.CACHE_DIR})


def test_pools_of_different_namespaces_keep_apart_what_they_fetched_into_a_folder_of_the_node() -> None:
    pools = []
    for namespace in ("a", "b"):
        made = make_pool(cache={"hostPath": "/data/naru"})
        pools.append(made.model_copy(update={"metadata": made.metadata.model_copy(update={"namespace": namespace})}))
    one, other = (env(worker_pod(each, raw_pool(), 0, SETTINGS))["NARU_WORKER_HOME"] for each in pools)
    assert one.startswith(f"{names.CACHE_DIR}/")
    assert one != other
    assert env(pod())["NARU_WORKER_HOME"] == names.CACHE_DIR


def test_a_cache_of_a_storage_class_is_a_claim_of_the_slot_that_the_pool_owns() -> None:
    spec: dict[str, Any] = {"cache": {"storageClassName": "fast", "size": "20Gi"}}
    claim = slot_claim(make_pool(**spec), raw_pool(**spec), 5)
    assert claim is not None
    assert claim["metadata"]["name"].startswith("p-5-cache-")
    assert claim["metadata"]["ownerReferences"][0]["uid"] == UID
    assert claim["metadata"]["labels"][names.LABEL_POOL] == "p"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    mounted = volumes(pod(slot=5, **spec))[names.CACHE_DIR][0]
    assert mounted == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert slot_claim(make_pool(), raw_pool(), 5) is None


def test_credentials_claims_and_folders_are_mounted_read_only_where_models_name_them() -> None:
    found = volumes(pod(credentialSecrets=["z", "hub"], claims=["weights"], nodeFolders=["/srv/models"]))
    assert set(found) == {
        names.CACHE_DIR, "/tmp", f"{names.CREDENTIALS_DIR}/hub", f"{names.CREDENTIALS_DIR}/z", "/models/weights",
        "/srv/models",
    }  # fmt: skip
    secret, mount = found[f"{names.CREDENTIALS_DIR}/hub"]
    assert secret == {"secret": {"secretName": "hub", "optional": True, "defaultMode": 0o440}}
    assert found["/models/weights"][0] == {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}
    assert found["/srv/models"][0] == {"hostPath": {"path": "/srv/models", "type": "Directory"}}
    read_only = {path for path, (_, each) in found.items() if each.get("readOnly")}
    assert read_only == set(found) - {names.CACHE_DIR, "/tmp"}
    assert mount["mountPath"] == f"{names.CREDENTIALS_DIR}/hub"


def test_a_gpu_pool_asks_for_its_gpus_nodes_and_shared_memory() -> None:
    accelerator = {"kind": "cuda", "count": 2, "product": "NVIDIA-H100"}
    item = pod(accelerator=accelerator, template={"resources": {"limits": {"memory": "64Gi"}}})
    assert container(item)["resources"] == {
        "requests": {"nvidia.com/gpu": "2"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
    }
    assert item["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100"}
    assert item["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert volumes(item)["/dev/shm"][0] == {"emptyDir": {"medium": "Memory"}}
    assert {"name": "NARU_WORKER_BACKEND", "value": "cuda"} in container(item)["env"]
    assert {"name": "NARU_WORKER_NUM_ACCELERATORS", "value": "2"} in container(item)["env"]
    assert "NARU_WORKER_BACKEND" not in {each["name"] for each in container(pod())["env"]}


def test_a_mig_slice_or_another_vendors_resource_is_asked_for_by_its_name() -> None:
    slice_pod = pod(accelerator={"kind": "cuda", "resourceName": "nvidia.com/mig-1g.10gb"})
    assert container(slice_pod)["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}
    assert slice_pod["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    other = pod(accelerator={"kind": "cuda", "resourceName": "amd.com/gpu"})
    assert other["spec"]["tolerations"][0]["key"] == "amd.com/gpu"


def test_packing_prefers_nodes_with_workers_of_any_pool() -> None:
    (term,) = pod(topology={"key": "rack"})["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term == {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "naru-operator"}},
            "namespaceSelector": {},
            "topologyKey": "rack",
        },
    }
    assert "topologySpreadConstraints" not in pod()["spec"]


def test_spreading_keeps_the_pools_workers_apart_where_it_can() -> None:
    spec = pod(topology={"policy": "Spread", "key": "zone"})["spec"]
    assert "affinity" not in spec
    assert spec["topologySpreadConstraints"] == [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {names.LABEL_POOL: "p"}},
        }
    ]


def test_the_grace_period_covers_move_and_drain_and_is_never_below_the_installations() -> None:
    def grace(floor_s: int) -> int:
        settings = dataclasses.replace(SETTINGS, template={"terminationGracePeriodSeconds": floor_s})
        found = pod(settings, drainTimeout="10s500ms", moveTimeout="20s")["spec"]["terminationGracePeriodSeconds"]
        assert isinstance(found, int)
        return found

    assert (grace(0), grace(40), grace(600)) == (46, 46, 600)


def test_a_limit_of_the_pool_takes_the_installations_request_away() -> None:
    requests = {"cpu": "1", "memory": "2Gi"}
    settings = dataclasses.replace(SETTINGS, template={"resources": {"requests": requests, "limits": {"x/y": "1"}}})
    item = pod(settings, template={"resources": {"limits": {"memory": "1Gi"}}})
    assert container(item)["resources"] == {"requests": {"cpu": "1"}, "limits": {"x/y": "1", "memory": "1Gi"}}


def test_the_disruption_budget_lets_one_worker_go_at_a_time() -> None:
    (budget,) = pool_objects(make_pool(), raw_pool(), SETTINGS)
    assert (budget["kind"], budget["metadata"]["name"]) == ("PodDisruptionBudget", "p-workers")
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {names.LABEL_POOL: "p"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
