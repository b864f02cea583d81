"""A model over a group of ranks, as one runner: rank 0 is in the engine's process, the others follow step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.ops.tensor_parallel.errors import CollectiveFailed
from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup
from naru_worker.adapters.ops.tensor_parallel.shards import ShardRunner, load_shard
from naru_worker.adapters.ops.tensor_parallel.wire import pack_batch

LOAD_TIMEOUT_S = 1800.0

_model_numbers = itertools.count(1)


def load_over_group(group: RankGroup, size: int, path: Path, backend: str, options: RunnerOptions) -> GroupRunner:
    """Loads a model on the first `size` ranks of a group at once; each reads its part of the files at the path.

    Raises:
        LoadError: a rank cannot load it; it is loaded nowhere then.
        RankLost: a rank is lost.
    """
    model = next(_model_numbers)
    header = {"do": "load", "model": model, "size": size, "path": str(path), "backend": backend}
    number = group.order({**header, "options": dataclasses.asdict(options)}, size=size, timeout_s=LOAD_TIMEOUT_S)
    try:
        runner = load_shard(path, backend, options, group.collectives[size])
    except BaseException:
        group.wait(number)
        group.order({"do": "close", "model": model}, size=size)
        raise
    try:
        errors = group.wait(number)
    except BaseException:
        runner.close()
        raise
    if errors:
        runner.close()
        group.order({"do": "close", "model": model}, size=size)
        rank, message = min(errors.items())
        raise LoadError(f"rank {rank} of {size}: {message}")
    return GroupRunner(group, size, model, runner)


class GroupRunner:
    """Implements `Runner`. Not thread-safe; all models of a group are run by one thread.

    Bytes are those of rank 0: no other rank has more.
    """

    def __init__(self, group: RankGroup, size: int, model: int, runner: ShardRunner) -> None:
        """`size`: ranks that it is cut over; `model`: its number on them."""
        self._group = group
        self._size = size
        self._model = model
        self._runner = runner
        self._is_closed = False
        self.kv: KVConfig = runner.kv
        self.weight_bytes = runner.weight_bytes
        self.kv_bytes = runner.kv_bytes
        self.max_wait_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Always: all ranks have loaded it."""
        return True

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step on all ranks; rank 0 samples.

        Raises:
            RankLost: a rank is lost; the runner is of no use any more.
        """
        with self._on_all_ranks(batch):
            return self._runner.run(batch, sampling)

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Forward only, (R, vocab).

        Raises:
            RankLost: a rank is lost; the runner is of no use any more.
        """
        with self._on_all_ranks(batch):
            return self._runner.logits(batch)

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Gives the memory of KV blocks back, on all ranks.

        Raises:
            InternalError: a rank could not.
            RankLost: a rank is lost.
        """
        self._runner.release_blocks(first_block, num_blocks)
        header = {"do": "release", "model": self._model, "first_block": first_block, "num_blocks": num_blocks}
        errors = self._group.wait(self._group.order(header, size=self._size))
        if errors:
            rank, message = min(errors.items())
            raise InternalError(f"rank {rank} of {self._size}: {message}")

    def close(self) -> None:
        """Gives back all memory, on all ranks that are still there."""
        if self._is_closed:
            return
        self._is_closed = True
        self._runner.close()
        if not self._group.is_lost:
            self._group.order({"do": "close", "model": self._model}, size=self._size)

    @contextlib.contextmanager
    def _on_all_ranks(self, batch: BatchInputs) -> Iterator[None]:
        """Has the others begin the step that rank 0 does inside."""
        if self._is_closed:
            raise RuntimeError("the runner is closed")
        # Without memory the step is given up before anybody has begun.
        self._runner.prepare(batch)
        number = self._group.order({"do": "step", "model": self._model}, pack_batch(batch), size=self._size)
        try:
            yield
        except CollectiveFailed as exc:
            raise self._group.loss(f"an exchange with other ranks failed: {exc}") from exc
        except BaseException as exc:
            if self._group.has_ended(number):  # all exchanges were made: only this step is lost
                raise
            raise self._group.loss(f"{type(exc).__name__}: {exc}") from exc
        if self._group.is_lost:
            # NCCL that was given up lets go of the device as if all had come: what was computed behind it is noise.
            raise self._group.loss()
