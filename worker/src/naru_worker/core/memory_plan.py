"""How much memory a model may ever get, decided from its files' sizes before any weight is read.

Called by the loader. Bytes in, blocks out. What is free at the moment is the hub's business: a KV cache starts small,
and grows while there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.errors import LoadError

MIN_SHORTENED_TOKENS = 512
"""A context is cut down to what the KV cache can hold, but not below this (or the model's own, if that is shorter)."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model's files say."""

    weight_bytes: int
    """Everything that comes with a load beside KV: weights, activations, tokenizer."""
    kv_block_bytes: int
    """One block over all layers."""
    block_size: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What the load asks for, and what is taken where it asks for nothing."""

    max_num_seqs: int
    max_model_len: int | None
    kv_cache_bytes: int | None
    default_kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the model gets."""

    num_blocks: int
    """The most there will ever be; null block included."""
    max_model_len: int
    kv_bytes: int
    """Of all blocks."""
    reason: str = ""
    """Why it is less than the model could use, where it is."""


def plan_memory(model: str, need: MemoryNeed, wish: MemoryWish, budget_bytes: int) -> MemoryPlan:
    """Most blocks, and context, of a model that has a whole budget to itself.

    A named KV size or context is kept or refused, never changed; the defaults shrink to what the budget allows.

    Raises:
        LoadError: it can never fit; says what is needed and what the budget is.
    """
    longest = need.max_position_embeddings
    context = wish.max_model_len or longest
    if context > longest:
        raise LoadError(
            f"model {model!r}: max_model_len is {context}, the model was made for {longest} tokens; lower it",
            param="max_model_len",
        )
    blocks_per_sequence = -(-context // need.block_size)
    room_bytes = budget_bytes - need.weight_bytes
    if wish.kv_cache_bytes is not None:
        if wish.kv_cache_bytes > room_bytes:
            raise LoadError(_does_not_fit(model, need, wish.kv_cache_bytes, budget_bytes), param="kv_cache_bytes")
        num_blocks = wish.kv_cache_bytes // need.kv_block_bytes
    else:
        useful = wish.max_num_seqs * blocks_per_sequence + 1
        num_blocks = max(0, min(wish.default_kv_cache_bytes, room_bytes)) // need.kv_block_bytes
        num_blocks = min(num_blocks, useful)
    held_tokens = max(0, num_blocks - 1) * need.block_size
    if held_tokens >= context:
        return _plan(need, num_blocks, context, "")
    if wish.max_model_len is not None or held_tokens < min(context, MIN_SHORTENED_TOKENS):
        least = context if wish.max_model_len is not None else min(context, MIN_SHORTENED_TOKENS)
        least_bytes = (-(-least // need.block_size) + 1) * need.kv_block_bytes
        if wish.kv_cache_bytes is not None or least_bytes <= room_bytes:
            given = wish.kv_cache_bytes or wish.default_kv_cache_bytes
            raise LoadError(
                f"model {model!r}: kv_cache_bytes is {given}, which holds {held_tokens} tokens; {least} tokens need "
                f"{least_bytes}; raise it or lower max_model_len",
                param="kv_cache_bytes",
            )
        raise LoadError(_does_not_fit(model, need, least_bytes, budget_bytes))
    reason = f"max_model_len is {held_tokens}, not {context}: the KV cache of {num_blocks} blocks holds no more"
    return _plan(need, num_blocks, held_tokens, reason)


def _plan(need: MemoryNeed, num_blocks: int, max_model_len: int, reason: str) -> MemoryPlan:
    kv_bytes = num_blocks * need.kv_block_bytes
    return MemoryPlan(num_blocks, max_model_len, kv_bytes, reason)


def _does_not_fit(model: str, need: MemoryNeed, kv_bytes: int, budget_bytes: int) -> str:
    return (
        f"model {model!r} needs {_mb(need.weight_bytes + kv_bytes)} ({_mb(need.weight_bytes)} of weights and work "
        f"space, {_mb(kv_bytes)} of KV cache); this worker's whole budget is {_mb(budget_bytes)}; raise "
        "memory_budget_bytes or give it less KV cache"
    )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
