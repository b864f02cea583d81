"""What a model will take, known from its files before anything of it is in memory. Blocking parts are the loader's.

Called by the loader. Settings of the worker and options of the load are merged here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.backend import kv_format
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.core.group_sizes import group_sizes
from naru_worker.core.hub.model import Footprint
from naru_worker.core.kv_growth import KVLayout, kv_floor_blocks, kv_layout
from naru_worker.core.memory_plan import MemoryNeed, MemoryWish, plan_memory
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.residency import KVCacheDtype, LoadOptions
from naru_worker.settings import EngineSettings, MemorySettings

PRIVATE_BYTES = 4 << 20
"""What comes with each loaded model beside weights, KV and tokenizer: tape, vectors, scheduler, batches."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the worker and options of the load, merged."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    max_draft_tokens: int
    """0: no speculation."""
    kv_cache_dtype: KVCacheDtype
    tensor_parallel_size: int
    """Accelerators that the model is cut over."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a model's files say about its size. Bytes are those of one accelerator."""

    config: ModelConfig
    weights_key: str
    weight_bytes: int
    kv_block_bytes: int
    workspace_bytes: int
    tokenizer_bytes: int
    device_bytes: int = 0
    """What each load has of a device beside all these."""
    can_sleep: bool = False
    """Whether it keeps that while its weights wait in host memory."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model gets."""

    footprint: Footprint
    runner_options: RunnerOptions
    kv_block_bytes: int
    kv: KVLayout
    floor_blocks: int
    enable_prefix_caching: bool
    reason: str
    """Why it is less than the model could use, where it is."""
    max_draft_tokens: int = 0
    """0: no speculation."""


def merge_options(settings: EngineSettings, options: LoadOptions) -> EngineOptions:
    """The load's word where it has one.

    Raises:
        LoadError: the step has no room for one token of each sequence, or the worker cannot cut a model so.
    """
    num_seqs = options.max_num_seqs or settings.max_num_seqs
    num_tokens = options.max_num_batched_tokens or max(settings.step_tokens, num_seqs)
    if num_tokens < num_seqs:
        raise LoadError(
            f"max_num_batched_tokens is {num_tokens}, below max_num_seqs {num_seqs}; raise it",
            param="max_num_batched_tokens",
        )
    caching = settings.enable_prefix_caching if options.enable_prefix_caching is None else options.enable_prefix_caching
    is_guessing = (options.speculation or settings.speculation) == "auto"
    num_drafts = (options.max_draft_tokens or settings.max_draft_tokens) if is_guessing else 0
    kv_cache_dtype = options.kv_cache_dtype or settings.kv_cache_dtype
    size = options.tensor_parallel_size or settings.tensor_parallel_size
    sizes = group_sizes(settings.num_accelerators)
    if size not in sizes:
        raise LoadError(
            f"tensor_parallel_size is {size}, and this worker's num_accelerators is {settings.num_accelerators}: write "
            f"{' or '.join(map(str, sizes))}, or serve the model on a worker with more accelerators",
            param="tensor_parallel_size",
        )
    return EngineOptions(num_seqs, num_tokens, caching, num_drafts, kv_cache_dtype, size)


def runner_options(settings: EngineSettings, options: EngineOptions, max_model_len: int, threads: int) -> RunnerOptions:
    """Limits of a runner whose number of blocks is not known yet."""
    return RunnerOptions(
        block_size=settings.block_size,
        num_blocks=2,
        max_num_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_model_len,
        # Ranks share the cores.
        num_threads=max(1, threads // options.tensor_parallel_size),
        kv_format=kv_format(settings.backend, options.kv_cache_dtype),
    )


def size_model(
    name: str,
    facts: FileFacts,
    base: RunnerOptions,
    settings: EngineSettings,
    memory: MemorySettings,
    options: LoadOptions,
    budget_bytes: int,
) -> ModelSize:
    """Blocks, context and footprint of a model on a worker with this budget.

    Raises:
        LoadError: it can never fit; says what is needed and what the budget is.
    """
    engine = merge_options(settings, options)
    private_bytes = PRIVATE_BYTES + facts.tokenizer_bytes + facts.device_bytes
    longest = facts.config.max_position_embeddings
    need = MemoryNeed(
        facts.weight_bytes + facts.workspace_bytes + private_bytes, facts.kv_block_bytes, base.block_size, longest
    )
    # The worker's own limit is a ceiling for all models; a load's is a wish for this one, kept or refused.
    ceiling = min(settings.max_model_len, longest) or None
    least_bytes = options.kv_cache_min_bytes or 0
    if need.weight_bytes + least_bytes > budget_bytes:
        raise LoadError(
            f"model {name!r} needs {need.weight_bytes} bytes and is to have {least_bytes} of KV cache at least; this "
            f"worker's whole budget is {budget_bytes}; lower kv_cache_min_bytes or raise memory_budget_bytes",
            param="kv_cache_min_bytes",
        )
    default_bytes = max(memory.kv_cache_bytes, least_bytes)
    wish = MemoryWish(engine.max_num_seqs, options.max_model_len or ceiling, options.kv_cache_bytes, default_bytes)
    plan = plan_memory(name, need, wish, budget_bytes)
    floor_blocks = kv_floor_blocks(plan.max_model_len, base.block_size)
    # More than all its sequences can use is no use.
    floor_blocks = min(plan.num_blocks, max(floor_blocks, least_bytes // facts.kv_block_bytes))
    layout = kv_layout(facts.kv_block_bytes, plan.num_blocks, floor_blocks)
    footprint = Footprint(
        facts.weights_key,
        facts.weight_bytes,
        layout.floor_bytes,
        facts.workspace_bytes,
        private_bytes,
        engine.tensor_parallel_size,
        asleep_bytes=facts.device_bytes if facts.can_sleep else 0,
    )
    limits = RunnerOptions(
        block_size=base.block_size,
        num_blocks=plan.num_blocks,
        max_num_tokens=base.max_num_tokens,
        max_num_seqs=base.max_num_seqs,
        max_model_len=plan.max_model_len,
        num_threads=base.num_threads,
        kv_format=base.kv_format,
    )
    return ModelSize(
        footprint,
        limits,
        facts.kv_block_bytes,
        layout,
        floor_blocks,
        engine.enable_prefix_caching,
        plan.reason,
        engine.max_draft_tokens,
    )
