"""The parts of a ModelDeployment's spec about memory: copies, scaling, residency, resources, engine limits."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from naru_proto.crd.base import CrdModel, Rule
from naru_proto.crd.units import Bytes, Seconds

ResidencyPolicy = Literal["Pinned", "Preferred", "OnDemand"]
Quantization = Literal["AsStored"]
Speculation = Literal["Auto", "Never"]
"""Never and not Off: YAML takes that for a truth value."""
KVCacheDtype = Literal["auto", "float16", "int8"]

MAX_REPLICAS = 1000


class ReplicasSpec(CrdModel):
    """How many copies of the model there may be, each on its own worker."""

    min: int = Field(
        default=1,
        ge=0,
        le=MAX_REPLICAS,
        description="Copies kept resident. 0 in a cluster, under policy Preferred: none is loaded ahead of requests; "
        "the first one loads a copy, which stays until its memory is needed. Under policy OnDemand the floor holds "
        "from the first request until `residency.idleTTL` has passed. `kubectl scale` sets this field.",
    )
    max: int | None = Field(
        default=None, ge=1, le=MAX_REPLICAS, description="Most copies. Absent: as many as there are workers."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "max",
            "!has(self.max) || self.min <= self.max",
            "must be at least replicas.min: raise max or lower min",
            lambda spec: spec.max is None or spec.min <= spec.max,
        ),
    )


class ScalingSpec(CrdModel):
    """When copies are added and removed between `replicas.min` and `replicas.max`."""

    target_in_flight: int = Field(
        default=16, alias="targetInFlight", ge=1, le=100_000, description="Requests in flight a copy should carry."
    )
    target_queue_time_s: Seconds = Field(
        default=1.0, alias="targetQueueTime", description="Longest wait for a first step that is not yet a shortage."
    )
    window_s: Seconds = Field(default=30.0, alias="window", description="Time over which load is averaged.")
    scale_down_delay_s: Seconds = Field(
        default=300.0, alias="scaleDownDelay", description="How long a copy must be spare before it goes."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "window",
            "duration(self.window) > duration('0s')",
            'must be longer than 0s: write for example "30s"',
            lambda spec: spec.window_s > 0,
        ),
        Rule(
            "scaleDownDelay",
            "duration(self.scaleDownDelay) >= duration(self.window)",
            "must be at least scaling.window, or copies would go on less than one average: raise it or lower window",
            lambda spec: spec.scale_down_delay_s >= spec.window_s,
        ),
    )


class ResidencySpec(CrdModel):
    """How hard the model holds its place in accelerator memory."""

    policy: ResidencyPolicy = Field(
        default="Preferred",
        description="Pinned: `replicas.min` copies are always resident and never evicted. Preferred: loaded ahead of "
        "requests, evicted under pressure only. OnDemand: loaded by the first request, leaves after `idleTTL`.",
    )
    priority: int = Field(
        default=100,
        ge=1,
        le=1000,
        description="Weight in the choice of victims: at 200 the model is twice as hard to evict as at 100.",
    )
    idle_ttl_s: Seconds = Field(
        default=600.0, alias="idleTTL", description="Time without requests after which an OnDemand model may leave."
    )
    min_residency_s: Seconds = Field(
        default=30.0, alias="minResidency", description="Time after its load in which no other model evicts it."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "idleTTL",
            "duration(self.idleTTL) >= duration(self.minResidency)",
            "must be at least residency.minResidency: raise idleTTL or lower minResidency",
            lambda spec: spec.idle_ttl_s >= spec.min_residency_s,
        ),
    )


class KVCacheSpec(CrdModel):
    """Memory for keys and values on each worker; of a copy over several accelerators, on each of them."""

    min_bytes: Bytes | None = Field(
        default=None, alias="min", description="The model is not loaded where less than this is left for its KV cache."
    )
    max_bytes: Bytes | None = Field(
        default=None, alias="max", description="Most the KV cache takes. Absent: the worker's own default."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "max",
            "!has(self.min) || !has(self.max) || quantity(string(self.min)).compareTo(quantity(string(self.max))) <= 0",
            "must be at least resources.kvCache.min: raise max or lower min",
            lambda spec: spec.min_bytes is None or spec.max_bytes is None or spec.min_bytes <= spec.max_bytes,
        ),
    )


class ResourcesSpec(CrdModel):
    """What one copy takes of a worker."""

    kv_cache: KVCacheSpec = Field(default_factory=KVCacheSpec, alias="kvCache", description="Budget of the KV cache.")
    quantization: Quantization = Field(
        default="AsStored", description="Format of the weights in memory. AsStored: the format of the files."
    )
    tensor_parallel: int = Field(
        default=1,
        alias="tensorParallel",
        ge=1,
        le=64,
        description="Accelerators one copy is cut over, a power of two: the first ones of a worker that has as many. "
        "1: it lies on the first alone.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "tensorParallel",
            "self.tensorParallel in [1, 2, 4, 8, 16, 32, 64]",
            "must be a power of two: write 1, 2, 4, 8, 16, 32 or 64",
            lambda spec: spec.tensor_parallel.bit_count() == 1,
        ),
    )


class EngineSpec(CrdModel):
    """Limits of the engine for this model. Absent fields take the worker's defaults."""

    max_model_len: int | None = Field(
        default=None, alias="maxModelLen", ge=1, le=2**24, description="Most tokens of prompt and output together."
    )
    max_num_seqs: int | None = Field(
        default=None, alias="maxNumSeqs", ge=1, le=65_536, description="Most sequences in one step."
    )
    max_num_batched_tokens: int | None = Field(
        default=None, alias="maxNumBatchedTokens", ge=1, le=2**20, description="Most tokens computed in one step."
    )
    enable_prefix_caching: bool | None = Field(
        default=None, alias="enablePrefixCaching", description="Whether prompts share the KV blocks of equal prefixes."
    )
    speculation: Speculation | None = Field(
        default=None,
        description="Whether tokens are guessed from what a text repeats of itself and computed beside the next one. "
        "Auto: where it is measured to pay. The answers are the same.",
    )
    max_draft_tokens: int | None = Field(
        default=None, alias="maxDraftTokens", ge=1, le=256, description="Most guessed tokens of a sequence in a step."
    )
    kv_cache_dtype: KVCacheDtype | None = Field(
        default=None,
        alias="kvCacheDtype",
        description="Element type of the KV cache: auto (the backend's own, float16 on CPUs), float16, or int8 (bytes "
        "with a scale for each token and KV head: half the memory).",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxNumBatchedTokens",
            "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
            "must be at least engine.maxNumSeqs, as each sequence takes a token a step: raise it or lower maxNumSeqs",
            lambda spec: (
                spec.max_num_seqs is None
                or spec.max_num_batched_tokens is None
                or spec.max_num_batched_tokens >= spec.max_num_seqs
            ),
        ),
    )


class BatchingSpec(CrdModel):
    """How inputs of a model that does not generate, an encoder or a model of tensors, are computed together."""

    max_batch_size: int | None = Field(
        default=None,
        alias="maxBatchSize",
        ge=1,
        le=65_536,
        description="Most inputs computed at once: texts, pairs, or rows of tensors. Absent: what the model's files "
        "say, else the worker's default.",
    )
    max_delay_s: Seconds | None = Field(
        default=None,
        alias="maxDelay",
        description="How long the first input of a batch waits for more while the model is idle, at most 60s. Absent: "
        "what the model's files say, else the worker's default.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "maxDelay",
            "!has(self.maxDelay) || duration(self.maxDelay) <= duration('60s')",
            'must be at most 60s: write for example "5ms"',
            lambda spec: spec.max_delay_s is None or spec.max_delay_s <= 60,
        ),
    )
