"""Manifests of a pool's objects: worker pods, cache volumes, the disruption budget. Called by the plan.

A pod follows Pod Security `restricted`, but for pools whose cache or model folders are hostPaths. What a pod is made
from is what `template_hash` looks at: whoever adds a field here adds it there.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from naru_operator.core.kube import Object, owner_reference
from naru_operator.core.pools.member_names import budget_name, member_name, pool_label
from naru_operator.core.pools.model import PodSettings
from naru_operator.core.pools.observe import CONTAINER
from naru_operator.core.pools.pod_env import worker_env
from naru_operator.core.pools.pod_template import merged_list, merged_map, merged_resources
from naru_operator.core.pools.pod_volumes import cache_claim, worker_volumes
from naru_operator.core.pools.template_hash import template_hash
from naru_proto import names
from naru_proto.crd.manifests import API_VERSION
from naru_proto.crd.v1alpha1 import WorkerPool

__all__ = ["pool_objects", "slot_claim", "template_hash", "worker_pod"]

USER_ID = 65532
"""Of the images; no user of any base image."""
EXIT_S = 15
"""For what a worker does after its drain: flush streams, give memory back, drop its lease."""
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_APP = "app.kubernetes.io/name"

_NVIDIA_TAINT = "nvidia.com/gpu"
_PRODUCT_LABEL = "nvidia.com/gpu.product"


def worker_pod(pool: WorkerPool, raw: Object, slot: int, settings: PodSettings) -> Object:
    """The pod of a slot; ``raw`` is the pool as the API server holds it, which will own the pod."""
    volumes, mounts = worker_volumes(pool, slot, settings)
    template = settings.template
    spec: Object = {
        "restartPolicy": "Always",
        "serviceAccountName": pool.spec.template.service_account_name or settings.service_account,
        # A worker never asks the API server.
        "automountServiceAccountToken": False,
        # Else each Service of the namespace adds variables, which a worker could take for its own.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_period_s(pool, settings),
        "securityContext": _pod_security(template.get("podSecurityContext")),
        "containers": [_container(pool, settings, mounts)],
        "volumes": volumes,
        "nodeSelector": _node_selector(pool, settings),
        "tolerations": _tolerations(pool, settings),
        "affinity": _affinity(pool, settings),
        "topologySpreadConstraints": _spread(pool, settings),
        "imagePullSecrets": merged_list(pool, settings, "imagePullSecrets"),
        "priorityClassName": pool.spec.template.priority_class_name or template.get("priorityClassName"),
        "runtimeClassName": pool.spec.template.runtime_class_name or template.get("runtimeClassName"),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(pool, raw, slot, settings),
        "spec": {name: value for name, value in spec.items() if value not in (None, "", [], {})},
    }


def pool_objects(pool: WorkerPool, raw: Object, settings: PodSettings) -> tuple[Object, ...]:
    """What a pool has once: its disruption budget. ``settings`` are not needed by it today."""
    del settings
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(pool.metadata.name),
            "namespace": pool.metadata.namespace,
            "labels": _own_labels(pool),
            "ownerReferences": [_owner(raw)],
        },
        "spec": {
            # One at a time, so that its models come up elsewhere before the next one goes.
            "maxUnavailable": 1,
            "selector": {"matchLabels": {names.LABEL_POOL: pool_label(pool.metadata.name)}},
            # A worker that never became ready must not hold up the drain of its node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    return (budget,)


def slot_claim(pool: WorkerPool, raw: Object, slot: int) -> Object | None:
    """The volume that a slot's pods keep their cache on, one after another; None: the pool's caches are no claims.

    It stays when its slot is empty, and goes with the pool.
    """
    claim = cache_claim(pool, slot)
    if claim is not None:
        claim["metadata"]["labels"] = {**_own_labels(pool), names.LABEL_SLOT: str(slot)}
        claim["metadata"]["ownerReferences"] = [_owner(raw)]
    return claim


def grace_period_s(pool: WorkerPool, settings: PodSettings) -> int:
    """Until the kubelet kills a worker that leaves: it moves its models, drains, ends."""
    needed = math.ceil(pool.spec.move_timeout_s + pool.spec.drain_timeout_s + EXIT_S)
    return max(needed, settings.template.get("terminationGracePeriodSeconds") or 0)


def _owner(raw: Object) -> Object:
    """Items of a list carry no kind of their own."""
    return owner_reference({**raw, "apiVersion": API_VERSION, "kind": "WorkerPool"})


def _own_labels(pool: WorkerPool) -> dict[str, str]:
    return {
        LABEL_APP: "naru",
        LABEL_COMPONENT: "worker",
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_POOL: pool_label(pool.metadata.name),
    }


def _metadata(pool: WorkerPool, raw: Object, slot: int, settings: PodSettings) -> Object:
    own = {names.LABEL_SLOT: str(slot), names.LABEL_TEMPLATE_HASH: template_hash(pool, settings)}
    return {
        "name": member_name(pool.metadata.name, slot),
        "namespace": pool.metadata.namespace,
        "labels": {**merged_map(pool, settings, "labels"), **_own_labels(pool), **own},
        "annotations": {
            **merged_map(pool, settings, "annotations"),
            names.ANNOTATION_POOL_NAME: pool.metadata.name,
        },
        "ownerReferences": [_owner(raw)],
    }


def _container(pool: WorkerPool, settings: PodSettings, mounts: list[Object]) -> Object:
    container: Object = {
        "name": CONTAINER,
        "image": pool.spec.image or settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "env": worker_env(pool, settings),
        "ports": [
            {"name": "grpc", "containerPort": names.PORT_WORKER_GRPC, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.PORT_WORKER_METRICS, "protocol": "TCP"},
        ],
        # No preStop: SIGTERM itself starts move and drain. A hook would take from the same grace period, and a worker
        # that does not know yet that it leaves would take new models meanwhile.
        "securityContext": _container_security(settings.template.get("securityContext")),
        # The last lines of the log say why a worker ended; without this they stay in the log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
        **_probes(settings.template.get("probes") or {}),
    }
    if resources := merged_resources(pool, settings):
        container["resources"] = resources
    return container


def _probes(changes: Object) -> dict[str, Object]:
    """All three ask the worker's gRPC health, which speaks of the process, never of a model.

    Liveness says no only when the engine is dead; readiness also while the worker drains, and until it was announced to
    the routers. Times are long: under full load an answer may take a while, and a needless restart costs all models.
    """
    port = names.PORT_WORKER_GRPC
    alive = {"grpc": {"port": port}}
    ready = {"grpc": {"port": port, "service": names.HEALTH_READY}}
    own = {
        # Ten minutes: a large image is read from a cold disk, and importing takes long on a busy node.
        "startup": {"periodSeconds": 2, "timeoutSeconds": 5, "failureThreshold": 300},
        "readiness": {"periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "liveness": {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
    }
    handlers = ("exec", "httpGet", "tcpSocket", "grpc")
    probes: dict[str, Object] = {}
    for name, times in own.items():
        changed: Object = changes.get(name) or {}
        # A probe has one handler: another one takes the place of ours.
        asked = alive if name == "liveness" else ready
        handler = {} if any(each in changed for each in handlers) else asked
        probes[f"{name}Probe"] = {**handler, **times, **changed}
    return probes


def _pod_security(changes: Object | None) -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # A cache of many files is not walked at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **(changes or {}),
    }


def _container_security(changes: Object | None) -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        **(changes or {}),
    }


def _node_selector(pool: WorkerPool, settings: PodSettings) -> dict[str, str]:
    product = pool.spec.accelerator.product
    return {**merged_map(pool, settings, "nodeSelector"), **({_PRODUCT_LABEL: product} if product else {})}


def _tolerations(pool: WorkerPool, settings: PodSettings) -> list[Object]:
    found = merged_list(pool, settings, "tolerations")
    accelerator = pool.spec.accelerator
    if accelerator.kind == "cuda":
        # Nodes with accelerators are often kept free of other pods by a taint called like the resource.
        is_nvidia = accelerator.resource_name.startswith("nvidia.com/")
        key = _NVIDIA_TAINT if is_nvidia else accelerator.resource_name
        usual = {"key": key, "operator": "Exists", "effect": "NoSchedule"}
        found += [] if usual in found else [usual]
    return found


def _affinity(pool: WorkerPool, settings: PodSettings) -> Object:
    affinity: Object = copy.deepcopy(settings.template.get("affinity") or {})
    topology = pool.spec.topology
    if topology.policy == "Pack":
        # Next to workers of any pool in any namespace, so that nodes without one stay free for large pods.
        term = {
            "labelSelector": {"matchLabels": {names.LABEL_MANAGED_BY: names.MANAGED_BY}},
            "namespaceSelector": {},
            "topologyKey": topology.key,
        }
        near: dict[str, Any] = affinity.setdefault("podAffinity", {})
        preferred = near.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
        preferred.append({"weight": 100, "podAffinityTerm": term})
    return affinity


def _spread(pool: WorkerPool, settings: PodSettings) -> list[Object]:
    constraints = list(settings.template.get("topologySpreadConstraints") or ())
    topology = pool.spec.topology
    if topology.policy == "Spread":
        constraint = {
            "maxSkew": 1,
            "topologyKey": topology.key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {names.LABEL_POOL: pool_label(pool.metadata.name)}},
        }
        constraints.append(constraint)
    return constraints
