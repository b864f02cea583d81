"""The parts of a ModelDeployment's spec about requests: placement, routing, queue, tenancy, rollout."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from naru_proto.crd.base import CrdModel, Items, Rule
from naru_proto.crd.units import DnsSubdomain, Seconds

RoutingStrategy = Literal["PrefixAffinity", "LeastLoaded", "RoundRobin"]
CacheIsolation = Literal["Isolated", "AfterSystem", "Shared"]
RolloutStrategy = Literal["Surge", "Recreate"]

DEFAULT_LOAD_FACTOR = 1.25
MAX_FALLBACKS = 8
MAX_SPLIT = 16

TenantName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$", max_length=63)]
LabelText = Annotated[str, StringConstraints(max_length=63)]


class PoolSelector(CrdModel):
    """Chooses WorkerPools by their labels."""

    match_labels: dict[str, LabelText] = Field(
        default_factory=dict,
        alias="matchLabels",
        max_length=16,
        description="Labels a WorkerPool must have, all of them. Empty: any pool.",
    )


class PlacementSpec(CrdModel):
    """Which workers may hold the model."""

    pool_selector: PoolSelector = Field(
        default_factory=PoolSelector, alias="poolSelector", description="Pools whose workers may hold the model."
    )
    spread_topology_key: str = Field(
        default="kubernetes.io/hostname",
        alias="spreadTopologyKey",
        min_length=1,
        max_length=316,
        description="Node label of the failure domain that copies are spread over.",
    )


class SplitShare(CrdModel):
    """One model that takes a part of the requests."""

    model: DnsSubdomain = Field(description="Name of a ModelDeployment, which may be this one.")
    weight: int = Field(ge=0, le=1000, description="Its part, beside the weights of the others. 0: none.")


class RoutingSpec(CrdModel):
    """Where requests go."""

    strategy: RoutingStrategy = Field(
        default="PrefixAffinity",
        description="PrefixAffinity: to the copy that answers soonest, by what it holds of the prompt and what waits "
        "there. LeastLoaded: to the copy with the fewest requests. RoundRobin: to one copy after the other.",
    )
    load_factor: float = Field(
        default=DEFAULT_LOAD_FACTOR,
        alias="loadFactor",
        ge=1.0,
        le=10.0,
        description="A copy takes at most this many times the mean load before requests overflow to the next. The "
        "default leaves it to the router's own setting.",
    )
    max_retries: int = Field(
        default=1, alias="maxRetries", ge=0, le=3, description="Tries on other workers before the first byte is sent."
    )
    split: Items[SplitShare] = Field(
        default=(),
        max_length=MAX_SPLIT,
        description="Models that share the requests for this one by weight. One conversation stays with one of them. "
        "Empty: this model alone. What they split themselves does not count.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["model"]},
    )
    fallbacks: Items[DnsSubdomain] = Field(
        default=(),
        max_length=MAX_FALLBACKS,
        description="ModelDeployments that answer, in this order, while no copy can be had. Their own fallbacks do "
        "not count.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "split",
            "!has(self.split) || size(self.split) == 0 || (self.split.exists(a, a.weight > 0) && "
            "self.split.all(a, self.split.exists_one(b, b.model == a.model)))",
            "must name each model once and have a weight above 0: repair it, or leave it out",
            lambda spec: (
                not spec.split
                or (
                    any(share.weight > 0 for share in spec.split)
                    and len({share.model for share in spec.split}) == len(spec.split)
                )
            ),
        ),
        Rule(
            "fallbacks",
            "!has(self.fallbacks) || self.fallbacks.all(a, self.fallbacks.exists_one(b, b == a))",
            "must name each model once: remove the repeated one",
            lambda spec: len(set(spec.fallbacks)) == len(spec.fallbacks),
        ),
    )


class QueueSpec(CrdModel):
    """How requests wait while no copy is ready."""

    max_wait_s: Seconds = Field(
        default=60.0, alias="maxWait", description="Longest wait; then 503 with the measured load time left."
    )
    max_depth: int = Field(
        default=256, alias="maxDepth", ge=0, le=100_000, description="Most requests that wait; one more gets 429."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxWait",
            "(duration(self.maxWait) > duration('0s')) == (self.maxDepth > 0)",
            "and queue.maxDepth must be zero together: set both to hold requests, or maxWait: 0s and maxDepth: 0",
            lambda spec: (spec.max_wait_s > 0) == (spec.max_depth > 0),
        ),
    )


class TenancySpec(CrdModel):
    """Who may use the model and what they share."""

    allow: Items[TenantName] = Field(
        default=(),
        max_length=256,
        description="Tenants that may use the model; for all others it does not exist. Empty: everybody.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    cache_isolation: CacheIsolation = Field(
        default="Isolated",
        alias="cacheIsolation",
        description="Isolated: no tenant meets another's cached prefixes. AfterSystem: the system prompt is shared, "
        "what follows is not. Shared: one cache for all.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "allow",
            "!has(self.allow) || self.allow.all(a, self.allow.exists_one(b, b == a))",
            "must name each tenant once: remove the repeated one",
            lambda spec: len(set(spec.allow)) == len(spec.allow),
        ),
    )


class RolloutSpec(CrdModel):
    """How a change of the model is carried out."""

    strategy: RolloutStrategy = Field(
        default="Surge",
        description="Surge: the old copies serve until as many new ones are ready. Recreate: the old ones leave first.",
    )
    progress_deadline_s: Seconds = Field(
        default=1800.0, alias="progressDeadline", description="Time after which a rollout that is not done has failed."
    )
    history_limit: int = Field(
        default=5, alias="historyLimit", ge=0, le=100, description="Earlier revisions kept for `naru rollout undo`."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "progressDeadline",
            "duration(self.progressDeadline) > duration('0s')",
            'must be longer than 0s: write for example "30m"',
            lambda spec: spec.progress_deadline_s > 0,
        ),
    )
