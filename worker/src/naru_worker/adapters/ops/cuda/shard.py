"""One rank's part of a model on its GPU.

Steps are those of the plain loop: a rank that does not sample knows the tokens of a step only from rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from naru_worker.adapters.ops.cuda.backend import weight_bytes
from naru_worker.adapters.ops.cuda.device import open_gpu
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError
from naru_worker.adapters.ops.cuda.ops import CudaOps
from naru_worker.adapters.ops.cuda.runner import CudaRunner
from naru_worker.adapters.ops.cuda.step_tensors import StepTensors
from naru_worker.adapters.ops.protocol import BatchInputs, Ops, RunnerOptions
from naru_worker.adapters.ops.tensor_parallel.sharded_checkpoint import ShardedCheckpoint


class CudaShard(CudaRunner):
    """Implements `ShardRunner`."""

    def __init__(self, checkpoint: ShardedCheckpoint, options: RunnerOptions, wrap: Callable[[Ops], Ops]) -> None:
        """Loads as `CudaRunner` does; `wrap` puts the exchanges around the operations."""
        super().__init__(open_gpu(), checkpoint, options, weight_bytes(checkpoint.sizes()))
        assert self._ops is not None, "it was just made"
        self._ops = cast(CudaOps, _WrappedOps(self._ops, wrap))
        # A rank that fails to capture what the others have captured would leave the order of exchanges.
        self.graphs.failure = "exchanges among ranks are not recorded into graphs"

    def prepare(self, batch: BatchInputs) -> None:
        """Has memory behind the blocks that a step writes to.

        Raises:
            OutOfDeviceMemory: there is no room for all of them.
        """
        self._kv_blocks.ensure_for(batch, self.kv.block_size)

    def follow(self, batch: BatchInputs) -> None:
        """The forward pass."""
        self.logits(batch)

    def close(self) -> None:
        """Gives back all memory, to the driver, too: ranks but the first have no hub that would do it."""
        super().close()
        with contextlib.suppress(DeviceError):  # as it closes
            self._gpu.release()


def load_shard(checkpoint: ShardedCheckpoint, options: RunnerOptions, wrap: Callable[[Ops], Ops]) -> CudaShard:
    """Packs the rank's weights, puts them on its GPU and allocates its part of the KV cache.

    Raises:
        LoadError: there is no GPU to use, a tensor cannot be cut, or the GPU has no room.
    """
    return CudaShard(checkpoint, options, wrap)


class _WrappedOps:
    """A backend's operations with exchanges between them; what is no operation stays the backend's."""

    def __init__(self, own: CudaOps, wrap: Callable[[Ops], Ops]) -> None:
        self._own = own
        # Weights were made already: the other half of the protocol is not asked for.
        self._wrapped = wrap(cast(Ops, own))

    @property
    def normed(self) -> Tensor:
        """What the head got."""
        return self._own.normed

    def begin(self, step: StepTensors, logits_out: Tensor | None = None) -> None:
        """Makes `step` the one being computed."""
        self._own.begin(step, logits_out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
