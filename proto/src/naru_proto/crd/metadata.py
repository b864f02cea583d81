"""The parts every Kubernetes object shares: metadata and status conditions."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from naru_proto.crd.base import CrdModel
from naru_proto.crd.units import DnsLabel, DnsSubdomain, Timestamp

ConditionStatus = Literal["True", "False", "Unknown"]


class ObjectMeta(CrdModel):
    """Standard object metadata: the fields Naru reads; the API server's others are let through unread."""

    model_config = ConfigDict(extra="ignore")

    name: DnsSubdomain = Field(description="Name of the object, unique in its namespace.")
    namespace: DnsLabel = Field(default="default", description="Namespace of the object.")
    uid: str | None = Field(default=None, description="Identity given by the API server.")
    generation: int | None = Field(default=None, ge=0, description="Counts changes of the spec.")
    resource_version: str | None = Field(
        default=None, alias="resourceVersion", description="Version of the stored object."
    )
    creation_timestamp: Timestamp | None = Field(
        default=None, alias="creationTimestamp", description="When the object was made."
    )
    deletion_timestamp: Timestamp | None = Field(
        default=None, alias="deletionTimestamp", description="When its deletion was asked for."
    )
    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the object.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of the object.")


class Condition(CrdModel):
    """One aspect of an object's state, in the form `kubectl wait` understands."""

    type: str = Field(
        max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Aspect, such as Ready or WeightsCached."
    )
    status: ConditionStatus = Field(description="Whether it holds.")
    reason: str = Field(
        max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9]*$", description="Why, as one word for programs."
    )
    message: str = Field(default="", max_length=32768, description="Why, in words for people.")
    last_transition_time: Timestamp = Field(alias="lastTransitionTime", description="When `status` last changed.")
    observed_generation: int | None = Field(
        default=None, alias="observedGeneration", ge=0, description="Generation of the spec this speaks of."
    )


class ObjectError(CrdModel):
    """The last thing that went wrong."""

    code: str = Field(max_length=128, description="Kind of error, such as model_load_failed.")
    message: str = Field(max_length=4096, description="What was wrong, the value, and what to do.")
    worker: str | None = Field(default=None, max_length=253, description="Worker that reported it.")
    at: Timestamp = Field(description="When it happened.")
