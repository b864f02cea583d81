"""Desired state on one machine: manifests as plain values. Called by `naru up` for what it read; does no I/O."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from naru_operator.core.scaling import Scaling, scaling_of
from naru_operator.core.traffic import Traffic, traffic_of
from naru_proto.crd.model_residency import BatchingSpec, EngineSpec, ResourcesSpec
from naru_proto.crd.v1alpha1 import ModelDeployment, ModelDeploymentSpec, WorkerPool
from naru_proto.errors import InvalidRequest

DRAIN_TIMEOUT_S = 30.0
"""Time a worker of the default pool gives its running requests when it leaves."""

DEFAULT_POOL = "default"
"""The pool that stands where the manifests name none."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one model's engine; None takes the worker's default."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_min_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    max_batch_size: int | None = None
    max_batch_delay_s: float | None = None
    speculation: str | None = None
    """``auto`` or ``off``."""
    max_draft_tokens: int | None = None
    tensor_parallel_size: int | None = None
    """Accelerators that the model is cut over."""


_SPECULATION = {"Auto": "auto", "Never": "off"}
_LEAST_IDLE_TTL_S = 0.001
"""What an idle TTL of nothing becomes: to a worker 0 means that the model stays."""


class Tier(enum.Enum):
    """How close to the engine a worker should bring a model."""

    COLD = "cold"
    """It knows the model: the first request brings it up."""
    ACTIVE = "active"
    """It loads the model ahead of requests."""


@dataclass(frozen=True, slots=True)
class Residency:
    """How hard a model holds its place on a worker."""

    tier: Tier = Tier.ACTIVE
    pinned: bool = False
    """Never evicted."""
    priority: int = 100
    """In [1, 1000]; at 200 it is twice as hard to evict as at 100."""
    min_residency_s: float = 0.0
    """After its load no other model evicts it for so long."""
    idle_ttl_s: float = 0.0
    """Without requests for so long it leaves by itself; 0: it stays."""
    keep_last_copy: bool = False
    """The last copy of a model that must have one: evicted after all others."""


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """One model to serve."""

    name: str
    uri: str
    revision: str
    aliases: tuple[str, ...]
    min_replicas: int
    pools: tuple[str, ...]
    """Pools whose workers may hold it, in name order; never empty."""
    limits: EngineLimits
    residency: Residency = Residency()
    credentials: str = ""
    """Name of the credentials of its source on the worker; empty: what the worker's environment offers."""
    scaling: Scaling = field(default=Scaling(), compare=False)
    """No part of what a generation stands for."""
    traffic: Traffic = field(default=Traffic(), compare=False)
    """Nor is this."""

    @property
    def is_on_demand(self) -> bool:
        """Whether it is loaded by requests alone: then every worker of its pools knows it."""
        return self.residency.tier is Tier.COLD


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """Like workers, as processes of this machine."""

    name: str
    num_workers: int
    num_threads: int | None
    """Compute threads of each; None is the worker's own choice: all cores."""
    memory_budget_bytes: int | None
    """For weights and KV caches of each; None is the worker's own choice."""
    drain_timeout_s: float
    host_budget_bytes: int | None = None
    """For models that wait in host memory, on each; None is the worker's own choice."""
    watermarks: tuple[float, float] | None = None
    """Shares of the budget, low and high: above the high one idle models leave, down to the low one. None: the
    worker's own.
    """

    def worker_ids(self) -> tuple[str, ...]:
        """Its workers' ids, stable over restarts."""
        return tuple(f"{self.name}-{index}" for index in range(self.num_workers))


@dataclass(frozen=True, slots=True)
class DesiredState:
    """All of it, in name order."""

    models: tuple[DesiredModel, ...]
    pools: tuple[DesiredPool, ...]


def desired_state(
    manifests: Iterable[ModelDeployment | WorkerPool], *, num_cores: int, num_workers: int | None = None
) -> DesiredState:
    """What the manifests ask of this machine; ``num_workers`` overrides the worker count of every pool.

    Several workers that name no thread count share the ``num_cores``, as none of them knows of the others.

    Raises:
        InvalidRequest: nothing to serve, or something that only a cluster can do; names manifest and field.
    """
    manifests = list(manifests)
    deployments = [m for m in manifests if isinstance(m, ModelDeployment)]
    pools = [m for m in manifests if isinstance(m, WorkerPool)]
    if not deployments:
        raise InvalidRequest("the manifests hold no ModelDeployment; give a file or folder that has one")
    _refuse_twins([("WorkerPool", p.metadata.name) for p in pools])
    _refuse_twins([("ModelDeployment", name) for d in deployments for name in d.served_names])
    desired_pools = [_pool(pool, num_workers) for pool in pools]
    if not pools:
        desired_pools = [DesiredPool(DEFAULT_POOL, num_workers or 1, None, None, DRAIN_TIMEOUT_S)]
    total = sum(pool.num_workers for pool in desired_pools)
    if total > 1:
        share = max(1, num_cores // total)
        desired_pools = [dataclasses.replace(pool, num_threads=pool.num_threads or share) for pool in desired_pools]
    labels = {pool.metadata.name: pool.metadata.labels for pool in pools} or {DEFAULT_POOL: {}}
    models = [_model(deployment, labels) for deployment in deployments]
    return DesiredState(
        models=tuple(sorted(models, key=lambda model: model.name)),
        pools=tuple(sorted(desired_pools, key=lambda pool: pool.name)),
    )


def _refuse_twins(keys: list[tuple[str, str]]) -> None:
    """Namespaces keep equal names apart in a cluster; on one machine nothing does."""
    seen: set[tuple[str, str]] = set()
    for kind, name in keys:
        if (kind, name) in seen:
            raise InvalidRequest(
                f"{kind} name {name!r} stands in two namespaces, and `naru up` has none; rename one",
                param="metadata.name",
            )
        seen.add((kind, name))


def _pool(pool: WorkerPool, num_workers: int | None) -> DesiredPool:
    name, spec = pool.metadata.name, pool.spec
    if spec.accelerator.kind != "cpu":
        raise InvalidRequest(
            f"WorkerPool {name!r} asks for {spec.accelerator.kind!r} workers, and `naru up` runs cpu workers; "
            "write accelerator.kind: cpu, or leave this file out",
            param="spec.accelerator.kind",
        )
    count = num_workers or max(spec.workers.min, 1)
    return DesiredPool(
        name,
        count,
        spec.threads,
        spec.memory.budget_bytes,
        spec.drain_timeout_s,
        host_budget_bytes=spec.memory.host_bytes,
        watermarks=(spec.memory.low_watermark, spec.memory.high_watermark),
    )


def _model(deployment: ModelDeployment, labels: dict[str, dict[str, str]]) -> DesiredModel:
    spec, name = deployment.spec, deployment.metadata.name
    wanted = spec.placement.pool_selector.match_labels
    pools = tuple(sorted(pool for pool, has in labels.items() if wanted.items() <= has.items()))
    if not pools:
        raise InvalidRequest(
            f"ModelDeployment {name!r}: no WorkerPool has the labels {wanted!r}; add them to one, or drop the selector",
            param="spec.placement.poolSelector",
        )
    return DesiredModel(
        name=name,
        uri=spec.model.uri,
        revision=spec.model.revision or "",
        aliases=(spec.alias,) if spec.alias else (),
        min_replicas=spec.replicas.min,
        pools=pools,
        limits=engine_limits(spec.engine, spec.resources, spec.batching),
        residency=residency_of(spec),
        scaling=scaling_of(spec, spec.resources),
        traffic=traffic_of(spec),
    )


def engine_limits(engine: EngineSpec, resources: ResourcesSpec, batching: BatchingSpec) -> EngineLimits:
    """What a manifest says of a model's engine, as a worker is told."""
    return EngineLimits(
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_bytes=resources.kv_cache.max_bytes,
        kv_cache_min_bytes=resources.kv_cache.min_bytes,
        enable_prefix_caching=engine.enable_prefix_caching,
        kv_cache_dtype=engine.kv_cache_dtype,
        max_batch_size=batching.max_batch_size,
        max_batch_delay_s=batching.max_delay_s,
        speculation=None if engine.speculation is None else _SPECULATION[engine.speculation],
        max_draft_tokens=engine.max_draft_tokens,
        tensor_parallel_size=resources.tensor_parallel,
    )


def residency_of(spec: ModelDeploymentSpec) -> Residency:
    """What a manifest says of a model's place in memory, as a worker is told."""
    policy = spec.residency.policy
    is_on_demand = policy == "OnDemand"
    return Residency(
        tier=Tier.COLD if is_on_demand else Tier.ACTIVE,
        pinned=policy == "Pinned",
        priority=spec.residency.priority,
        min_residency_s=spec.residency.min_residency_s,
        idle_ttl_s=max(_LEAST_IDLE_TTL_S, spec.residency.idle_ttl_s) if is_on_demand else 0.0,
        keep_last_copy=spec.replicas.min >= 1 and not is_on_demand,
    )
