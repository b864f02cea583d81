"""The volumes of a worker's pod: cache, scratch space, credentials, model folders. Called by the pod's manifest."""

from __future__ import annotations

from dataclasses import dataclass

from naru_operator.core.kube import Object
from naru_operator.core.pools.member_names import claim_name
from naru_operator.core.pools.model import PodSettings
from naru_proto import names
from naru_proto.crd.units import format_bytes
from naru_proto.crd.v1alpha1 import WorkerPool


@dataclass(frozen=True, slots=True)
class Mounted:
    """A volume and where the worker's container sees it."""

    volume: Object
    mount: Object


def worker_volumes(pool: WorkerPool, slot: int, settings: PodSettings) -> tuple[list[Object], list[Object]]:
    """(volumes, mounts) of the pod; what the installation adds comes last."""
    spec = pool.spec
    mounted = [_mounted("cache", _cache(pool, slot), names.CACHE_DIR), _mounted("tmp", {"emptyDir": {}}, "/tmp")]
    if spec.accelerator.kind == "cuda":
        # The runtime's 64 MiB are too few for what the processes of one tensor-parallel group hand each other.
        mounted.append(_mounted("shared-memory", {"emptyDir": {"medium": "Memory"}}, "/dev/shm"))
    # Sorted: the lists are sets, and their order must not make a pod outdated.
    for index, name in enumerate(sorted(spec.credential_secrets)):
        # Optional: where a Secret is missing, loads that name it fail with that reason, and all others go on.
        secret = {"secret": {"secretName": name, "optional": True, "defaultMode": 0o440}}
        mounted.append(_mounted(f"credential-{index}", secret, f"{names.CREDENTIALS_DIR}/{name}", read_only=True))
    for index, name in enumerate(sorted(spec.claims)):
        claim = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
        mounted.append(_mounted(f"claim-{index}", claim, f"{names.CLAIMS_DIR}/{name}", read_only=True))
    for index, path in enumerate(sorted(spec.node_folders)):
        folder = {"hostPath": {"path": path, "type": "Directory"}}
        mounted.append(_mounted(f"node-folder-{index}", folder, path, read_only=True))
    return (
        [each.volume for each in mounted] + list(settings.template.get("volumes") or ()),
        [each.mount for each in mounted] + list(settings.template.get("volumeMounts") or ()),
    )


def cache_claim(pool: WorkerPool, slot: int) -> Object | None:
    """The PersistentVolumeClaim of a slot's cache, without owner and labels; None: the pool's caches are no claims."""
    storage_class, size_bytes = pool.spec.cache.storage_class_name, pool.spec.cache.size_bytes
    if storage_class is None or size_bytes is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim_name(pool.metadata.name, slot, storage_class),
            "namespace": pool.metadata.namespace,
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": format_bytes(size_bytes)}},
        },
    }


def _cache(pool: WorkerPool, slot: int) -> Object:
    cache = pool.spec.cache
    if cache.storage_class_name is not None:
        return {"persistentVolumeClaim": {"claimName": claim_name(pool.metadata.name, slot, cache.storage_class_name)}}
    if cache.host_path is not None:
        # Pod Security `baseline` and `restricted` forbid hostPath: such a pool's namespace must be `privileged`. No
        # group is given to a node's folder: it must be writable for the worker's user.
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"emptyDir": {} if cache.size_bytes is None else {"sizeLimit": format_bytes(cache.size_bytes)}}


def _mounted(name: str, source: Object, path: str, *, read_only: bool = False) -> Mounted:
    mount: Object = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return Mounted({"name": name, **source}, mount)
