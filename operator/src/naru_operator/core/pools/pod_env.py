"""The environment of a worker's container: its settings, out of a pool's spec. Called by the pod's manifest.

The variables are those of the worker's own settings; `naru up` gives the same ones as flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from naru_operator.core.kube import Object
from naru_operator.core.pools.model import PodSettings
from naru_proto import names
from naru_proto.crd.pod_template import EnvVar
from naru_proto.crd.v1alpha1 import WorkerPool

REDIS_SECRET_KEY = "url"
_PREFIX = "NARU_WORKER_"
_FILES_SHARE, _IMAGES_SHARE = 0.50, 0.45
"""Of a bounded cache: fetched files and packed images of the same models are about as large. The rest is for what is
half written: the kubelet evicts a pod whose volume passes its bound."""


def worker_env(pool: WorkerPool, settings: PodSettings) -> list[Object]:
    """Each name once. What Naru needs wins over the pool's template, that over the installation's.

    Naru's come first, as `$(POD_IP)` stands only for variables above.
    """
    ours = {item["name"]: item for item in _ours(pool, settings)}
    theirs: dict[str, Object] = {}
    for item in _theirs(pool, settings):
        theirs[item["name"]] = item
    return [*ours.values(), *(item for name, item in theirs.items() if name not in ours)]


def _home(pool: WorkerPool) -> str:
    """Where files are kept. Pools of several namespaces may share a folder of their nodes, and Secrets of equal names
    are not the same Secret: what one namespace's credentials fetched is no other's.
    """
    if pool.spec.cache.host_path is None:
        return names.CACHE_DIR
    return f"{names.CACHE_DIR}/{pool.metadata.namespace}"


def _ours(pool: WorkerPool, settings: PodSettings) -> Iterator[Object]:
    spec = pool.spec
    yield _from_field("POD_IP", "status.podIP")
    yield _from_field(f"{_PREFIX}ID", "metadata.name")
    yield _from_field(f"{_PREFIX}NODE", "spec.nodeName")
    values = {
        "LISTEN": f"0.0.0.0:{names.PORT_WORKER_GRPC}",
        "ADVERTISE": f"$(POD_IP):{names.PORT_WORKER_GRPC}",
        "METRICS_LISTEN": f"0.0.0.0:{names.PORT_WORKER_METRICS}",
        "POOL": pool.metadata.name,
        "HOME": _home(pool),
        "DRAIN_TIMEOUT_S": _number(spec.drain_timeout_s),
        "MOVE_TIMEOUT_S": _number(spec.move_timeout_s),
        "HIGH_WATERMARK": _number(spec.memory.high_watermark),
        "LOW_WATERMARK": _number(spec.memory.low_watermark),
    }
    if spec.memory.budget_bytes is not None:
        values["MEMORY_BUDGET_BYTES"] = str(spec.memory.budget_bytes)
    if spec.memory.host_bytes is not None:
        values["HOST_BUDGET_BYTES"] = str(spec.memory.host_bytes)
    if spec.accelerator.kind == "cuda":
        values["BACKEND"] = "cuda"
        if spec.accelerator.num_accelerators > 1:
            values["NUM_ACCELERATORS"] = str(spec.accelerator.num_accelerators)
    if spec.threads is not None:
        values["NUM_THREADS"] = str(spec.threads)
    if spec.cache.size_bytes is not None:
        values["CACHE_BUDGET_BYTES"] = str(int(spec.cache.size_bytes * _FILES_SHARE))
        values["IMAGE_BUDGET_BYTES"] = str(int(spec.cache.size_bytes * _IMAGES_SHARE))
    yield from _plain({_PREFIX + name: value for name, value in values.items()}.items())
    secret = {"name": settings.redis_secret, "key": REDIS_SECRET_KEY}
    yield {"name": f"{_PREFIX}REDIS_URL", "valueFrom": {"secretKeyRef": secret}}


def _theirs(pool: WorkerPool, settings: PodSettings) -> Iterator[Object]:
    # Libraries write into the home folder, and the root file system is read-only.
    yield from _plain({"HOME": "/tmp", f"{_PREFIX}LOG_LEVEL": settings.log_level}.items())
    yield from _plain(settings.env.items())
    yield from (item for item in settings.template.get("env") or () if isinstance(item, dict) and "name" in item)
    yield from (_from_template(item) for item in pool.spec.template.env)


def _from_template(item: EnvVar) -> Object:
    if item.secret_key is None:
        return {"name": item.name, "value": item.value}
    reference = {"name": item.secret_key.name, "key": item.secret_key.key}
    return {"name": item.name, "valueFrom": {"secretKeyRef": reference}}


def _from_field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _plain(values: Iterable[tuple[str, Any]]) -> Iterator[Object]:
    return ({"name": name, "value": value} for name, value in values)


def _number(value: float) -> str:
    """Without an exponent and without digits that say nothing."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
