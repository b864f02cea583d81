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
    vocab: range
    """Rows of the head; the first ranks may have one more."""
    config: ModelConfig
    """What the rank's decoder and KV cache go by. The head is always a tensor of its own, of `vocab`'s rows;
    `vocab_size` stays that of the embedding."""


def shard_of(config: ModelConfig, rank: int, size: int, inner_block: int = 1) -> Shard:
    """The part of a rank; `inner_block`: how many columns of `down` cannot be parted, as they share a scale.

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
    num_units = config.intermediate_size // inner_block
    assert num_units * inner_block == config.intermediate_size, "a row of a file is whole blocks"
    if num_units < size:
        raise LoadError(
            f"intermediate_size is {config.intermediate_size}, in blocks of {inner_block} columns that share a scale: "
            f"too few for {size} ranks; use at most {num_units}, or a file with smaller blocks",
            param="tensor_parallel_size",
        )
    if config.vocab_size < size:
        raise _cannot("vocab_size", config.vocab_size, size, "at most vocab_size")
    units = _part(num_units, rank, size)
    inner = range(units.start * inner_block, units.stop * inner_block)
    return Shard(
        rank=rank,
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        vocab=_part(config.vocab_size, rank, size),
        config=replace(
            config,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            intermediate_size=len(inner),
            tie_word_embeddings=False,
            o_bias=config.o_bias and rank == 0,
        ),
    )


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
