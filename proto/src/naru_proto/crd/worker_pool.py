"""WorkerPool: a set of like workers, and how many of them there may be.

Read by the operator (pods) and by `naru up` (processes).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from naru_proto.crd.base import ChangeRule, CrdModel, Items, Rule
from naru_proto.crd.metadata import Condition, ObjectError, ObjectMeta
from naru_proto.crd.pod_template import PodTemplate
from naru_proto.crd.units import Bytes, DnsSubdomain, Seconds

AcceleratorKind = Literal["cpu", "cuda"]
TopologyPolicy = Literal["Pack", "Spread"]
PoolPhase = Literal["Pending", "Scaling", "Ready", "Degraded", "Draining", "Failed"]

NodeFolder = Annotated[str, StringConstraints(pattern=r"^/[^:\x00-\x1f]+$", max_length=1024)]

MAX_WORKERS = 1000
MAX_MEMBERS = 256


class AcceleratorSpec(CrdModel):
    """What the workers compute on."""

    kind: AcceleratorKind = Field(default="cpu", description="cpu: the CPU backend. cuda: NVIDIA GPUs.")
    count: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="GPUs a worker holds; several form one group, over which it cuts models that ask for it "
        "(resources.tensorParallel). Absent: 1 for cuda; not for cpu.",
    )
    resource_name: str = Field(
        default="nvidia.com/gpu",
        alias="resourceName",
        min_length=1,
        max_length=316,
        description="Kubernetes resource the pods ask for when kind is cuda; a MIG slice's name works too.",
    )
    product: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        description="Value of the node label nvidia.com/gpu.product that nodes must have. Absent: any.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "count",
            "self.kind != 'cpu' || !has(self.count)",
            "must be absent for kind cpu: leave it out or write kind: cuda",
            lambda spec: spec.kind != "cpu" or spec.count is None,
        ),
        Rule(
            "product",
            "self.kind != 'cpu' || !has(self.product)",
            "must be absent for kind cpu: leave it out or write kind: cuda",
            lambda spec: spec.kind != "cpu" or spec.product is None,
        ),
    )
    change_rules: ClassVar[tuple[ChangeRule, ...]] = (
        ChangeRule(
            "kind",
            "self.kind == oldSelf.kind",
            "cannot be changed, as models placed for one kind may not fit the other: make a second WorkerPool and "
            "delete this one",
        ),
    )

    @property
    def num_accelerators(self) -> int:
        """Accelerators a worker holds; 0 for cpu."""
        return 0 if self.kind == "cpu" else self.count or 1


class MemorySpec(CrdModel):
    """Memory models may take on one worker."""

    budget_bytes: Bytes | None = Field(
        default=None,
        alias="budget",
        description="Memory for weights, KV caches and work space of loaded models, on each accelerator. Absent: 70 % "
        "of what the worker has, 90 % of a GPU.",
    )
    host_bytes: Bytes | None = Field(
        default=None,
        alias="host",
        description="Host memory that keeps evicted weights for a quick return. Absent: a tenth of the worker's "
        "memory; 0: none.",
    )
    high_watermark: float = Field(
        default=0.80,
        alias="highWatermark",
        ge=0.01,
        le=1.0,
        description="Part of the budget above which idle models leave.",
    )
    low_watermark: float = Field(
        default=0.70,
        alias="lowWatermark",
        ge=0.01,
        le=1.0,
        description="Part of the budget down to which they leave.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "lowWatermark",
            "self.lowWatermark < self.highWatermark",
            "must be less than memory.highWatermark: lower it or raise highWatermark",
            lambda spec: spec.low_watermark < spec.high_watermark,
        ),
    )


class WorkersSpec(CrdModel):
    """How many workers there may be."""

    min: int = Field(
        default=1, ge=0, le=MAX_WORKERS, description="Workers kept running. `kubectl scale` sets this field."
    )
    max: int | None = Field(default=None, ge=1, le=MAX_WORKERS, description="Most workers. Absent: the same as min.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "max",
            "!has(self.max) || self.min <= self.max",
            "must be at least workers.min: raise max or lower min",
            lambda spec: spec.max is None or spec.min <= spec.max,
        ),
    )


class AutoscalingSpec(CrdModel):
    """When workers are added and removed between `workers.min` and `workers.max`."""

    target_memory_ratio: float = Field(
        default=0.75,
        alias="targetMemoryRatio",
        ge=0.01,
        le=1.0,
        description="Part of the pool's memory budget that resident models should take.",
    )
    target_queue_time_s: Seconds = Field(
        default=5.0, alias="targetQueueTime", description="Longest wait for a worker that is not yet a shortage."
    )
    scale_down_delay_s: Seconds = Field(
        default=600.0, alias="scaleDownDelay", description="How long a worker must be spare before it drains."
    )


class ModelCacheSpec(CrdModel):
    """Disk that keeps fetched files between restarts."""

    size_bytes: Bytes | None = Field(default=None, alias="size", description="Room for files. Absent: no bound.")
    storage_class_name: DnsSubdomain | None = Field(
        default=None, alias="storageClassName", description="Makes a volume of this class for each worker."
    )
    host_path: str | None = Field(
        default=None,
        alias="hostPath",
        max_length=4096,
        pattern=r"^/",
        description="Folder of the node that its workers share.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "hostPath",
            "!has(self.hostPath) || !has(self.storageClassName)",
            "and cache.storageClassName exclude each other: leave one out",
            lambda spec: spec.host_path is None or spec.storage_class_name is None,
        ),
        Rule(
            "size",
            "!has(self.storageClassName) || has(self.size)",
            'must be set with cache.storageClassName: write for example size: "50Gi"',
            lambda spec: spec.storage_class_name is None or spec.size_bytes is not None,
        ),
    )
    change_rules: ClassVar[tuple[ChangeRule, ...]] = (
        ChangeRule(
            "storageClassName",
            "has(self.storageClassName) == has(oldSelf.storageClassName)"
            " && (!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName)",
            "cannot be set, changed or removed later, as the workers' volumes stay what they are: make a second "
            "WorkerPool and delete this one",
        ),
        ChangeRule(
            "size",
            "!has(oldSelf.storageClassName) || !has(oldSelf.size) || !has(self.size)"
            " || quantity(string(self.size)).compareTo(quantity(string(oldSelf.size))) >= 0",
            "cannot be lowered with cache.storageClassName, as volumes do not shrink: keep it, or make a second "
            "WorkerPool",
        ),
    )


class PoolRolloutSpec(CrdModel):
    """How a change of the workers' pods is carried out, one worker after another."""

    max_surge: int = Field(
        default=1,
        alias="maxSurge",
        ge=0,
        le=MAX_WORKERS,
        description="Workers that may run above `workers.min` meanwhile. 0: an old worker leaves before its successor "
        "starts, where accelerators are too few for both.",
    )
    progress_deadline_s: Seconds = Field(
        default=1800.0,
        alias="progressDeadline",
        description="Time after which a new worker that is not ready has failed; the old ones stay.",
    )


class TopologySpec(CrdModel):
    """Where on the nodes the workers go."""

    policy: TopologyPolicy = Field(
        default="Pack",
        description="Pack: next to other workers, so that whole nodes stay free. Spread: evenly over the domains.",
    )
    key: str = Field(
        default="kubernetes.io/hostname", min_length=1, max_length=316, description="Node label of the domain."
    )


class WorkerPoolSpec(CrdModel):
    """What the platform team wants."""

    accelerator: AcceleratorSpec = Field(default_factory=AcceleratorSpec, description="What the workers compute on.")
    workers: WorkersSpec = Field(default_factory=WorkersSpec, description="How many workers there may be.")
    memory: MemorySpec = Field(default_factory=MemorySpec, description="Memory models may take on one worker.")
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="Compute threads of a cpu worker. Absent: the cores it may use."
    )
    cache: ModelCacheSpec = Field(default_factory=ModelCacheSpec, description="Disk that keeps fetched files.")
    autoscaling: AutoscalingSpec = Field(
        default_factory=AutoscalingSpec, description="When workers are added and removed."
    )
    drain_timeout_s: Seconds = Field(
        default=60.0, alias="drainTimeout", description="Time a worker that leaves gives its running requests."
    )
    move_timeout_s: Seconds = Field(
        default=60.0,
        alias="moveTimeout",
        description="Time before that in which a worker that leaves still serves while its models come up elsewhere.",
    )
    rollout: PoolRolloutSpec = Field(
        default_factory=PoolRolloutSpec, description="How a change of the workers' pods is carried out."
    )
    topology: TopologySpec = Field(default_factory=TopologySpec, description="Where on the nodes the workers go.")
    credential_secrets: Items[DnsSubdomain] = Field(
        default=(),
        alias="credentialSecrets",
        max_length=16,
        description="Secrets of the pool's namespace that models may name as `model.credentialsSecret`. Mounted as "
        "files; the operator never reads them.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    claims: Items[DnsSubdomain] = Field(
        default=(),
        max_length=16,
        description="PersistentVolumeClaims of the pool's namespace, mounted read-only for `pvc://claim/path`.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    node_folders: Items[NodeFolder] = Field(
        default=(),
        alias="nodeFolders",
        max_length=16,
        description="Folders of the nodes, mounted read-only at the same path for `file:///path`.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=r"^[^\s]+$",
        description="Container image of the workers. Absent: the one the operator was installed with.",
    )
    template: PodTemplate = Field(default_factory=PodTemplate, description="What to change in the workers' pods.")


class WorkersStatus(CrdModel):
    """Workers, counted."""

    desired: int = Field(default=0, ge=0, description="Workers there should be now.")
    ready: int = Field(default=0, ge=0, description="Workers that take models and requests.")
    draining: int = Field(default=0, ge=0, description="Workers that are leaving.")


class Member(CrdModel):
    """One worker of the pool."""

    worker: str = Field(max_length=253, description="Its name.")
    node: str | None = Field(default=None, max_length=253, description="Node it runs on.")
    ready: bool = Field(default=False, description="Whether it takes models and requests.")
    draining: bool = Field(default=False, description="Whether it is leaving.")
    budget_bytes: int | None = Field(default=None, alias="budgetBytes", ge=0, description="Memory models may take.")
    used_bytes: int | None = Field(default=None, alias="usedBytes", ge=0, description="Memory models take.")
    num_models: int = Field(default=0, alias="numModels", ge=0, description="Models resident on it.")


class WorkerPoolStatus(CrdModel):
    """What is true of the pool now."""

    observed_generation: int | None = Field(
        default=None, alias="observedGeneration", ge=0, description="Generation of the spec this status speaks of."
    )
    phase: PoolPhase | None = Field(default=None, description="The state in one word.")
    conditions: Items[Condition] = Field(
        default=(),
        max_length=16,
        description="Accepted, Ready, Progressing and StorageReady, each with its reason.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    workers: WorkersStatus = Field(default_factory=WorkersStatus, description="Workers, counted.")
    selector: str | None = Field(
        default=None, max_length=1024, description="Label selector of the workers, for the scale subresource."
    )
    budget_bytes: int | None = Field(default=None, alias="budgetBytes", ge=0, description="Sum over the members.")
    used_bytes: int | None = Field(default=None, alias="usedBytes", ge=0, description="Sum over the members.")
    members: Items[Member] = Field(
        default=(),
        max_length=MAX_MEMBERS,
        description="Workers one by one, in order of names, at most 256.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["worker"]},
    )
    last_error: ObjectError | None = Field(
        default=None, alias="lastError", description="The last thing that went wrong; kept until the pool is ready."
    )


class WorkerPool(CrdModel):
    """A set of like workers."""

    api_version: Literal["serving.naru.dev/v1alpha1"] = Field(
        alias="apiVersion", description="serving.naru.dev/v1alpha1"
    )
    kind: Literal["WorkerPool"] = Field(description="WorkerPool")
    metadata: ObjectMeta = Field(description="Standard object metadata.")
    spec: WorkerPoolSpec = Field(default_factory=WorkerPoolSpec, description="What the platform team wants.")
    status: WorkerPoolStatus = Field(
        default_factory=WorkerPoolStatus, description="What is true now; written by the operator."
    )
