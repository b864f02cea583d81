"""ModelDeployment: one model a team wants served. The spec is the user's, the status the operator's.

Read by the operator and the `naru` command; `docs/reference` and `crds/` are printed from the descriptions here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from naru_proto.crd.base import CrdModel, Items, Rule
from naru_proto.crd.metadata import ObjectMeta
from naru_proto.crd.model_residency import (
    BatchingSpec,
    EngineSpec,
    ReplicasSpec,
    ResidencySpec,
    ResourcesSpec,
    ScalingSpec,
)
from naru_proto.crd.model_status import ModelDeploymentStatus
from naru_proto.crd.model_traffic import PlacementSpec, QueueSpec, RolloutSpec, RoutingSpec, TenancySpec
from naru_proto.crd.units import DnsLabel, DnsSubdomain, ModelNameText, ModelUriText

MAX_ADAPTERS = 64


class ModelSource(CrdModel):
    """Where the model's files come from."""

    uri: ModelUriText = Field(
        description="Files of the model: `hf://owner/name`, `pypi://package`, `file:///path`, `pvc://claim/path`, "
        "`s3://bucket/path`, `gs://bucket/path` or `oci://registry/repository:tag`."
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Commit, tag, version or digest to take. Absent: the newest when the model is first fetched.",
    )
    credentials_secret: DnsSubdomain | None = Field(
        default=None,
        alias="credentialsSecret",
        description="Secret with the credentials of the source; one of the pool's `credentialSecrets`. Absent: what "
        "the worker's environment offers.",
    )


class Adapter(CrdModel):
    """A LoRA adapter over the base model, asked for as `model:adapter`."""

    name: DnsLabel = Field(description="Name of the adapter, unique in this model.")
    uri: ModelUriText = Field(description="Files of the adapter; the same forms as `model.uri`.")
    revision: str | None = Field(default=None, min_length=1, max_length=253, description="As `model.revision`.")


class ModelDeploymentSpec(CrdModel):
    """What the user wants."""

    model: ModelSource = Field(description="Where the model's files come from.")
    adapters: Items[Adapter] = Field(
        default=(),
        max_length=MAX_ADAPTERS,
        description="LoRA adapters over the base model.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    alias: ModelNameText | None = Field(
        default=None,
        description="A second name applications may ask for. While another ModelDeployment has it, this one waits for "
        "it; taken out there, it moves here once as many copies are ready here.",
    )
    replicas: ReplicasSpec = Field(default_factory=ReplicasSpec, description="How many copies there may be.")
    scaling: ScalingSpec = Field(default_factory=ScalingSpec, description="When copies are added and removed.")
    residency: ResidencySpec = Field(
        default_factory=ResidencySpec, description="How hard the model holds its place in memory."
    )
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec, description="What one copy takes of a worker.")
    engine: EngineSpec = Field(default_factory=EngineSpec, description="Limits of the engine for this model.")
    batching: BatchingSpec = Field(
        default_factory=BatchingSpec, description="How inputs are computed together where the model does not generate."
    )
    placement: PlacementSpec = Field(default_factory=PlacementSpec, description="Which workers may hold the model.")
    routing: RoutingSpec = Field(default_factory=RoutingSpec, description="How requests choose among the copies.")
    queue: QueueSpec = Field(default_factory=QueueSpec, description="How requests wait while no copy is ready.")
    tenancy: TenancySpec = Field(default_factory=TenancySpec, description="Who may use the model and what they share.")
    rollout: RolloutSpec = Field(default_factory=RolloutSpec, description="How a change of the model is carried out.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "adapters",
            "!has(self.adapters) || self.adapters.all(a, self.adapters.exists_one(b, b.name == a.name))",
            "must have unique names: rename or remove the repeated one",
            lambda spec: len({adapter.name for adapter in spec.adapters}) == len(spec.adapters),
        ),
        Rule(
            "replicas.min",
            "self.residency.policy != 'Pinned' || self.replicas.min >= 1",
            "must be at least 1 for policy Pinned: write replicas: {min: 1} or another residency.policy",
            lambda spec: spec.residency.policy != "Pinned" or spec.replicas.min >= 1,
        ),
    )


class ModelDeployment(CrdModel):
    """One model a team wants served, under its object's name."""

    api_version: Literal["serving.naru.dev/v1alpha1"] = Field(
        alias="apiVersion", description="serving.naru.dev/v1alpha1"
    )
    kind: Literal["ModelDeployment"] = Field(description="ModelDeployment")
    metadata: ObjectMeta = Field(description="Standard object metadata; the name is what applications ask for.")
    spec: ModelDeploymentSpec = Field(description="What the user wants.")
    status: ModelDeploymentStatus = Field(
        default_factory=ModelDeploymentStatus, description="What is true now; written by the operator."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "spec.alias",
            "!has(self.spec.alias) || self.spec.alias != self.metadata.name",
            "must differ from metadata.name, which is served anyway: choose another alias or leave it out",
            lambda model: model.spec.alias != model.metadata.name,
        ),
        Rule(
            "spec.routing.fallbacks",
            "!has(self.spec.routing.fallbacks) || !self.spec.routing.fallbacks.exists(a, a == self.metadata.name)",
            "must name other models, as this one is tried first: take its own name out",
            lambda model: model.metadata.name not in model.spec.routing.fallbacks,
        ),
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names applications may ask for: the object's own, then the alias."""
        return (self.metadata.name, self.spec.alias) if self.spec.alias else (self.metadata.name,)
