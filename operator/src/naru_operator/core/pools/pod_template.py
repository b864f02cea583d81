"""What installation and pool change in the workers' pods, merged. Called by the pod's manifest.

The installation's template is a mapping of the fields in FIELDS, each in the shape of the Kubernetes API; the pool's is
`spec.template`. The pool wins field by field, and key by key in maps; lists are joined.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from naru_operator.core.kube import Object
from naru_operator.core.pools.model import PodSettings
from naru_proto.crd.v1alpha1 import WorkerPool
from naru_proto.errors import InvalidRequest

_MAPS = (
    "labels", "annotations", "nodeSelector", "affinity", "resources", "probes", "podSecurityContext", "securityContext",
)  # fmt: skip
_LISTS = ("tolerations", "topologySpreadConstraints", "imagePullSecrets", "env", "volumes", "volumeMounts")
_TEXTS = ("priorityClassName", "runtimeClassName")
_NUMBERS = ("terminationGracePeriodSeconds",)
FIELDS = (*_MAPS, *_LISTS, *_TEXTS, *_NUMBERS)
"""Known fields of `PodSettings.template`."""
PROBES = ("startup", "readiness", "liveness")
"""Known fields of `probes`: each holds fields of a Probe that replace the operator's own."""


def check_template(template: Mapping[str, Any]) -> None:
    """Refuses an installation's template that would be ignored in part.

    Raises:
        InvalidRequest: an unknown field, or one of the wrong shape.
    """
    for kinds, shape, text in ((_MAPS, dict, "a mapping"), (_LISTS, list, "a list"), (_TEXTS, str, "a text")):
        for name in kinds:
            if not isinstance(template.get(name, shape()), shape):
                raise InvalidRequest(f"the worker template's {name} is {template[name]!r}; write {text}", param=name)
    for name in _LISTS:
        if not all(isinstance(item, dict) for item in template.get(name, ())):
            raise InvalidRequest(f"the worker template's {name} must hold mappings alone", param=name)
    for name in _NUMBERS:
        value = template.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidRequest(f"the worker template's {name} is {value!r}; write whole seconds", param=name)
    _refuse_unknown(template, FIELDS, "")
    _refuse_unknown(template.get("probes", {}), PROBES, "probes.")
    _refuse_unknown(template.get("resources", {}), ("requests", "limits"), "resources.")


def _refuse_unknown(item: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for name in item:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields here are {', '.join(known)}"
            raise InvalidRequest(f"the worker template has no field {place}{name}: {hint}", param=f"{place}{name}")


def merged_map(pool: WorkerPool, settings: PodSettings, name: str) -> dict[str, Any]:
    """Labels, annotations or nodeSelector, key by key."""
    ours: dict[str, dict[str, str]] = {
        "labels": pool.spec.template.labels,
        "annotations": pool.spec.template.annotations,
        "nodeSelector": pool.spec.template.node_selector,
    }
    return {**(settings.template.get(name) or {}), **ours[name]}


def merged_list(pool: WorkerPool, settings: PodSettings, name: str) -> list[Object]:
    """Tolerations or imagePullSecrets: the installation's, then the pool's, none twice."""
    if name == "tolerations":
        ours = [toleration.to_wire() for toleration in pool.spec.template.tolerations]
    else:
        ours = [{"name": secret} for secret in (*settings.image_pull_secrets, *pool.spec.template.image_pull_secrets)]
    joined: list[Object] = []
    for item in (*(settings.template.get(name) or ()), *ours):
        if item not in joined:
            joined.append(item)
    return joined


def merged_resources(pool: WorkerPool, settings: PodSettings) -> dict[str, dict[str, Any]]:
    """Requests and limits, with the accelerators the pool holds; empty maps are left out."""
    base, ours = settings.template.get("resources") or {}, pool.spec.template.resources
    # A pool that only limits an amount asks for no more: a request of the installation could lie above that limit.
    inherited = {name: value for name, value in (base.get("requests") or {}).items() if name not in ours.limits}
    requests = {**inherited, **ours.requests}
    limits = {**(base.get("limits") or {}), **ours.limits}
    accelerator = pool.spec.accelerator
    if accelerator.kind == "cuda":
        requests[accelerator.resource_name] = limits[accelerator.resource_name] = str(accelerator.num_accelerators)
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}
