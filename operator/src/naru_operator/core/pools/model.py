"""The words of decisions about WorkerPools: what is seen and what is to be done. For planner and controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_operator.core.kube import Object, ObjectKey
from naru_proto.crd.v1alpha1 import WorkerPool
from naru_proto.registry import WorkerRecord


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the installation gives every worker pod."""

    image: str
    """Used where a pool names none."""
    redis_secret: str
    """Secret of the pool's namespace with the key `url`: where the route map is. It may hold a password."""
    service_account: str = "default"
    """Used where a pool's template names none."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    log_level: str = "info"
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment of every worker, such as the address of a package mirror."""
    cluster_domain: str = "cluster.local"
    template: Object = field(default_factory=dict)
    """Fields of a pod's spec and metadata that the installation sets for all workers, below what a pool sets."""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A worker's pod, as the API server shows it."""

    key: ObjectKey
    uid: str
    pool: str
    """Full name of the pool, which the label holds cut when it is long."""
    slot: int | None
    """None: its label cannot be read."""
    template_hash: str
    node: str | None
    owner_uid: str | None
    """Of the controlling owner."""
    is_ready: bool
    is_terminating: bool
    is_finished: bool
    """Succeeded or failed: it will never run again."""
    created_s: float
    """Unix seconds."""
    trouble_reason: str = ""
    """Why it is not ready, as one CamelCase word: Unschedulable, ImagePullBackOff, OOMKilled… Empty: it only starts.
    ContainerCreating is trouble only when it lasts."""
    trouble: str = ""
    """The same in words, as the scheduler or the kubelet say it."""
    num_restarts: int = 0
    ready_changed_s: float = 0.0
    """When `is_ready` last changed, Unix seconds; 0: unknown."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All that a plan for one pool may depend on."""

    pool: WorkerPool
    raw: Object
    """The pool's object as the API server holds it: for its uid."""
    pods: tuple[ObservedPod, ...]
    """All pods that carry the pool's label, foreign ones included."""
    workers: Mapping[str, WorkerRecord]
    """Living leases by worker id, which is the pod's name."""
    claims: Mapping[str, str]
    """PersistentVolumeClaims of the pool's namespace: name to phase (Pending, Bound, Lost)."""
    settings: PodSettings
    taken_names: frozenset[str] = frozenset()
    """Names under which a pod could not be created, as one that is none of the pool's and lacks its label has them.
    Known only by asking the API server for that pod: one of the pool's own belongs into `pods`."""


@dataclass(frozen=True, slots=True)
class PodToDelete:
    """A pod that goes, gracefully: its worker moves its models and drains."""

    key: ObjectKey
    uid: str
    """A precondition: another pod of that name is not touched."""
    reason: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What to do for one pool now; planning again from the state it leads to gives nothing to do."""

    apply: tuple[Object, ...] = ()
    """Objects to apply whenever they differ from what was applied last: disruption budget, claims."""
    create: tuple[Object, ...] = ()
    """Pods. One that exists already under its name is no error: it is seen at the next turn."""
    delete: tuple[PodToDelete, ...] = ()
    reasons: tuple[str, ...] = ()
    """A line for each creation and deletion, and for each that is put off."""
    problem_reason: str = ""
    """Why the pool cannot come to what is asked, as one CamelCase word (NameConflict, StorageNotReady,
    RolloutStuck, Unschedulable…); empty: it can."""
    problem: str = ""
    """The same in words, with the remedy."""
    problem_worker: str = ""
    """The pod the problem shows on; empty: it is not one pod's."""
    storage_problem: str = ""
    """Why volumes are not ready, in words; empty: they are, or only start."""
    is_accepted: bool = True
    """False: nothing at all is done for this pool, for `problem_reason`."""
