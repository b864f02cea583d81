"""One rank's part of a model on the `ref` backend."""

from __future__ import annotations

import torch

from naru_worker.adapters.ops.protocol import BatchInputs, RunnerOptions
from naru_worker.adapters.ops.ref import RefRunner
from naru_worker.adapters.ops.tensor_parallel.shards import Wrap
from naru_worker.adapters.weights.checkpoint import Checkpoint


class RefShard(RefRunner):
    """Implements `ShardRunner`."""

    def prepare(self, batch: BatchInputs) -> None:
        """All memory was taken when it was loaded."""

    def follow(self, batch: BatchInputs) -> None:
        """The forward pass."""
        self.logits(batch)


def load_shard(checkpoint: Checkpoint, options: RunnerOptions, wrap: Wrap) -> RefShard:
    """Decodes the rank's weights and allocates its cache. Sets torch's thread count, which is the process's.

    Raises:
        LoadError: a tensor is missing or cannot be cut.
    """
    torch.set_num_threads(options.num_threads)
    return RefShard(checkpoint, options, wrap)
