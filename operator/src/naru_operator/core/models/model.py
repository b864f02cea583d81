"""The words of decisions about ModelDeployments: what is seen, what is to be done, what is told.

Read by the planner, the status writer and the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_operator.core.kube import Object, ObjectKey
from naru_operator.core.model_plan import Applied, LoadModel, ObservedModel, UnloadModel
from naru_operator.core.placement import NO_FACTS, PlacementFacts
from naru_proto.crd.v1alpha1 import ModelDeployment, WorkerPool
from naru_proto.registry import ModelRecord, WorkerRecord


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """A living worker, in any pool."""

    record: WorkerRecord
    """Its lease. `leaving` or `draining`: its models are wanted elsewhere, nothing new goes there."""
    models: Mapping[str, ObservedModel]
    """By registry name; the lease's, with what commands under way will make of them."""


@dataclass(frozen=True, slots=True)
class ModelsSnapshot:
    """All that a plan for the models may depend on."""

    deployments: tuple[ModelDeployment, ...]
    invalid: Mapping[ObjectKey, str]
    """ModelDeployments that an older schema let through and nobody can read: why."""
    raw: Mapping[ObjectKey, Object]
    """Every ModelDeployment as the API server holds it, for uids."""
    pools: tuple[WorkerPool, ...]
    workers: Mapping[str, ClusterWorker]
    records: Mapping[str, ModelRecord]
    """The registry as it stands."""
    revisions: tuple[Object, ...]
    """ControllerRevisions that belong to ModelDeployments."""
    applied: Mapping[str, Applied] = field(default_factory=dict)
    """The last plan's; empty at the start."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Registry name to the newest generation that a worker named when it refused one of ours as stale."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Registry name to what the last command about it failed with, where no lease tells it."""
    placement: PlacementFacts = NO_FACTS
    started_s: Mapping[str, int] = field(default_factory=dict)
    """The last plan's; empty at the start. Registry name of a revision that a rollout leads to: when it began, Unix
    seconds; of one that nobody wants any more and workers still hold: since when.
    """


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided for one ModelDeployment; its status is told from it."""

    key: ObjectKey
    is_accepted: bool
    reason: str
    """CamelCase word of the Accepted condition."""
    message: str = ""
    current: str = ""
    """Digest of the revision that serves; empty: none yet."""
    update: str = ""
    """Digest of the revision the spec asks for."""
    rollout_reason: str = ""
    """CamelCase word of the Progressing condition: RolloutComplete, WaitingForCopies, RevisionFailed and so on."""
    rollout_message: str = ""
    has_rollout_failed: bool = False
    placed_on: tuple[str, ...] = ()
    """Workers that should hold or know the revision the spec asks for."""
    num_desired: int = 0
    """Copies there should be now; on demand 1 while one is up."""
    pools: tuple[str, ...] = ()
    """Pools whose workers may hold the revision the spec asks for."""
    is_on_demand: bool = False
    """Requests load it; until then its workers only know it."""


@dataclass(frozen=True, slots=True)
class ModelsPlan:
    """What to do for all models now; planning again from the state it leads to gives nothing to do."""

    create_revisions: tuple[Object, ...] = ()
    """ControllerRevisions, created before anything is loaded from them. One that exists is no error."""
    delete_revisions: tuple[ObjectKey, ...] = ()
    put_records: tuple[ModelRecord, ...] = ()
    delete_records: tuple[str, ...] = ()
    unload_models: tuple[UnloadModel, ...] = ()
    load_models: tuple[LoadModel, ...] = ()
    applied: Mapping[str, Applied] = field(default_factory=dict)
    """For the next snapshot."""
    started_s: Mapping[str, int] = field(default_factory=dict)
    """For the next snapshot."""
    verdicts: Mapping[ObjectKey, Verdict] = field(default_factory=dict)
    """Of every ModelDeployment that is not being deleted."""
    reasons: tuple[str, ...] = ()
    """A line for each step."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.reasons
