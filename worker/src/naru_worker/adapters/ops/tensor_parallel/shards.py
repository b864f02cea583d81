"""Loads one rank's part of a model on a backend that knows how."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import BatchInputs, Ops, Runner, RunnerOptions
from naru_worker.adapters.ops.tensor_parallel.collectives import Collectives, workspace_bytes
from naru_worker.adapters.ops.tensor_parallel.parallel_ops import ParallelOps
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.opening import open_checkpoint
from naru_worker.core.model_config import ModelConfig

LOADERS = {
    "cuda": "naru_worker.adapters.ops.cuda.shard",
    "ref": "naru_worker.adapters.ops.tensor_parallel.ref_shard",
}
"""Backend to the module that offers ``load_shard(checkpoint, options, wrap) -> ShardRunner``."""

_ELEMENT_BYTES = {"cuda": 2, "ref": 4}
"""Of what ranks exchange."""

Wrap = Callable[[Ops], Ops]
"""Puts the exchanges around a backend's operations."""


class ShardRunner(Runner, Protocol):
    """One rank's part of a model on its device. `run` and `logits` are rank 0's, `follow` is that of all others."""

    def prepare(self, batch: BatchInputs) -> None:
        """Takes the memory that a step needs, before any other rank hears of the step.

        Raises:
            OutOfDeviceMemory: there is none; the step can be given up, and others go on.
        """

    def follow(self, batch: BatchInputs) -> None:
        """The forward pass of a step whose logits rank 0 has."""


def load_shard(path: Path, backend: str, options: RunnerOptions, collectives: Collectives) -> ShardRunner:
    """One rank's part of the model at the path; only its slices are read.

    Raises:
        LoadError: the model cannot be loaded or split, or the backend has no tensor parallelism.
    """
    if backend not in LOADERS:
        raise LoadError(
            f"backend {backend!r} cannot split a model over ranks; use one of {', '.join(sorted(LOADERS))}",
            param="backend",
        )
    module = importlib.import_module(LOADERS[backend])
    whole = open_checkpoint(path)
    try:
        vocab_size = whole.config.vocab_size
        checkpoint = ShardedCheckpoint(whole, collectives.rank, collectives.size)
        runner: ShardRunner = module.load_shard(
            checkpoint, options, lambda inner: ParallelOps(inner, collectives, vocab_size)
        )
    except BaseException:
        whole.close()
        raise
    return runner


def shard_sizes(checkpoint: Checkpoint, num_ranks: int) -> Checkpoint:
    """Rank 0's part of a checkpoint, for what it will take: the data of columns are not read.

    Raises:
        LoadError: the model cannot be split over so many ranks.
    """
    return ShardedCheckpoint(checkpoint, 0, num_ranks, is_sizes_only=True)


def exchange_bytes(backend: str, config: ModelConfig, options: RunnerOptions) -> int:
    """About what the exchanges of a step take on a rank, beside the activations."""
    return workspace_bytes(
        options.max_num_tokens, config.hidden_size, options.max_num_seqs, config.vocab_size, _ELEMENT_BYTES[backend]
    )
