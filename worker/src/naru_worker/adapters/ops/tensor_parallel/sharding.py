"""Which part of a model a rank has: heads, columns of the MLP, rows of the head. Counts alone; no tensors.

Whole on every rank: embeddings, positions, norms. Split by rows, so that each rank computes some of the outputs: q, k,
v, gate, up and the head. Split by columns, so that the ranks' outputs add up: o and down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from naru_proto.errors import LoadError
from naru_worker.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank."""

    rank: int
    size: int
    """Ranks in all."""
    heads: range
    kv_heads: range
    """Where there are fewer than ranks, several ranks have the same one."""
    inner: range
    """Columns of the MLP's inner layer; ranks may have unequally many."""
    expert_inner: range
    """Columns of each expert's inner layer, the same of all experts; empty where there are none."""
    shared_inner: range
    """Columns of the shared expert's inner layer."""
    vocab: range
    """Rows of the head; the first ranks may have one more."""
    config: ModelConfig
    """What the rank's decoder and KV cache go by. The head is always a tensor of its own, of `vocab`'s rows;
    `vocab_size` stays that of the embedding."""


@dataclass(frozen=True, slots=True)
class InnerBlocks:
    """How many columns of `down` cannot be parted, as they share a scale."""

    plain: int = 1
    expert: int = 1
    shared: int = 1


_NO_BLOCKS = InnerBlocks()


def shard_of(config: ModelConfig, rank: int, size: int, blocks: InnerBlocks = _NO_BLOCKS) -> Shard:
    """The part of a rank. Experts are not shared out: each rank has some columns of all of them.

    Raises:
        LoadError: the model cannot be split into so many parts.
        ValueError: no such rank.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank!r} of {size!r}; ranks count from 0 up to size - 1")
    heads = _part(config.num_heads, rank, size)
    if config.num_heads % size:
        raise _cannot("num_heads", config.num_heads, size, "a divisor of num_heads")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise _cannot("num_kv_heads", config.num_kv_heads, size, "a divisor or a multiple of num_kv_heads")
    if config.num_kv_heads >= size:
        kv_heads = _part(config.num_kv_heads, rank, size)
    else:
        first = rank * config.num_kv_heads // size
        kv_heads = range(first, first + 1)
    if config.vocab_size < size:
        raise _cannot("vocab_size", config.vocab_size, size, "at most vocab_size")
    inner, expert_inner, shared_inner, experts = range(0), range(0), range(0), config.experts
    if experts is None or len(experts.layers) < config.num_layers:
        inner = _inner("intermediate_size", config.intermediate_size, blocks.plain, rank, size)
    if experts is not None:
        expert_inner = _inner("the size of an expert", experts.inner_size, blocks.expert, rank, size)
        if experts.shared_size:
            shared_inner = _inner("the size of the shared expert", experts.shared_size, blocks.shared, rank, size)
        experts = replace(experts, inner_size=len(expert_inner), shared_size=len(shared_inner))
    return Shard(
        rank=rank,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        expert_inner=expert_inner,
        shared_inner=shared_inner,
        vocab=_part(config.vocab_size, rank, size),
        config=replace(
            config,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(inner),
            experts=experts,
            tie_word_embeddings=False,
            o_bias=config.o_bias and rank == 0,
        ),
    )


def _inner(name: str, width: int, block: int, rank: int, size: int) -> range:
    """Whole blocks of an inner layer."""
    num_units = width // block
    assert num_units * block == width, "a row of a file is whole blocks"
    if num_units < size:
        raise LoadError(
            f"{name} is {width}, in blocks of {block} columns that share a scale: "
            f"too few for {size} ranks; use at most {num_units}, or a file with smaller blocks",
            param="tensor_parallel_size",
        )
    units = _part(num_units, rank, size)
    return range(units.start * block, units.stop * block)


def _part(total: int, rank: int, size: int) -> range:
    """The rank-th of `size` runs that make up [0, total); the first ones may be one longer."""
    each, more = divmod(total, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _cannot(name: str, value: int, size: int, remedy: str) -> LoadError:
    return LoadError(
        f"{name} is {value}: the model cannot be split over {size} ranks; tensor_parallel_size must be {remedy}",
        param="tensor_parallel_size",
    )
