"""Status of a ModelDeployment: what the operator writes back for people. Routers read the route map instead."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from naru_proto.crd.base import CrdModel, Items
from naru_proto.crd.metadata import Condition, ObjectError
from naru_proto.crd.units import Timestamp

ModelPhase = Literal["Pending", "Placing", "Fetching", "Loading", "Ready", "Degraded", "Draining", "Unloaded", "Failed"]
ResidentState = Literal["Cold", "Fetching", "Host", "Loading", "Ready", "Active", "Draining", "Failed"]
EvictionReason = Literal["Idle", "Pressure", "Replaced", "WorkerDraining", "Deleted", "Requested"]

MAX_RESIDENTS = 64


class ReplicasStatus(CrdModel):
    """Copies of the model, counted."""

    desired: int = Field(default=0, ge=0, description="Copies there should be now.")
    resident: int = Field(default=0, ge=0, description="Copies in memory, loading ones included.")
    ready: int = Field(default=0, ge=0, description="Copies that take requests.")


class Resident(CrdModel):
    """One copy of the model on one worker."""

    worker: str = Field(max_length=253, description="Worker that holds it.")
    pool: str | None = Field(default=None, max_length=253, description="WorkerPool of that worker.")
    state: ResidentState = Field(description="State on that worker.")
    weight_bytes: int | None = Field(default=None, alias="weightBytes", ge=0, description="Memory of the weights.")
    kv_bytes: int | None = Field(default=None, alias="kvBytes", ge=0, description="Memory of the KV cache.")
    in_flight: int = Field(default=0, alias="inFlight", ge=0, description="Requests in flight.")
    since: Timestamp | None = Field(default=None, description="When it reached this state.")
    last_used: Timestamp | None = Field(default=None, alias="lastUsed", description="When a request last used it.")
    generation: int | None = Field(default=None, ge=0, description="Generation of the spec it was loaded from.")


class LoadStatus(CrdModel):
    """Progress of the load that goes on now."""

    worker: str | None = Field(default=None, max_length=253, description="Worker that loads.")
    started_at: Timestamp = Field(alias="startedAt", description="When it began.")
    bytes_done: int = Field(default=0, alias="bytesDone", ge=0, description="Bytes fetched and loaded.")
    bytes_total: int = Field(default=0, alias="bytesTotal", ge=0, description="Bytes to fetch and load; 0 if unknown.")
    eta_seconds: int | None = Field(
        default=None, alias="etaSeconds", ge=0, description="Seconds left, from measured loads; absent if unknown."
    )


class EvictionStatus(CrdModel):
    """The last time a copy had to leave."""

    worker: str = Field(max_length=253, description="Worker it left.")
    reason: EvictionReason = Field(description="Why it left.")
    by: str | None = Field(default=None, max_length=253, description="Model it made room for.")
    at: Timestamp = Field(description="When it left.")


class ModelDeploymentStatus(CrdModel):
    """What is true of the model now."""

    observed_generation: int | None = Field(
        default=None, alias="observedGeneration", ge=0, description="Generation of the spec this status speaks of."
    )
    phase: ModelPhase | None = Field(
        default=None, description="The state in one word; names the step while the model is on its way."
    )
    conditions: Items[Condition] = Field(
        default=(),
        max_length=16,
        description="Accepted, Placed, WeightsCached, Loaded, Available, Progressing and Degraded, each with its "
        "reason.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    replicas: ReplicasStatus = Field(default_factory=ReplicasStatus, description="Copies, counted.")
    selector: str | None = Field(
        default=None, max_length=1024, description="Label selector of the workers, for the scale subresource."
    )
    resolved_revision: str | None = Field(
        default=None, alias="resolvedRevision", max_length=253, description="Revision that is served."
    )
    current_revision: str | None = Field(
        default=None, alias="currentRevision", max_length=63, description="Digest of the revision that serves."
    )
    update_revision: str | None = Field(
        default=None,
        alias="updateRevision",
        max_length=63,
        description="Digest of the revision the spec asks for; differs from currentRevision while a rollout goes on "
        "or has failed.",
    )
    weight_bytes: int | None = Field(
        default=None, alias="weightBytes", ge=0, description="Memory one copy's weights take."
    )
    residents: Items[Resident] = Field(
        default=(),
        max_length=MAX_RESIDENTS,
        description="Copies one by one, in order of worker names, at most 64.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["worker"]},
    )
    load: LoadStatus | None = Field(default=None, description="The load that goes on now, if one does.")
    last_used: Timestamp | None = Field(default=None, alias="lastUsed", description="When a request last used it.")
    last_eviction: EvictionStatus | None = Field(
        default=None, alias="lastEviction", description="The last time a copy had to leave."
    )
    last_error: ObjectError | None = Field(
        default=None, alias="lastError", description="The last thing that went wrong; kept until the model is ready."
    )
