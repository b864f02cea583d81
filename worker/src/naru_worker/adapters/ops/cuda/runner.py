"""A model on a GPU, one step after another: the plain loop, which waits for each step's tokens.

Made by `backend`, called by the engine thread.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from naru_proto.errors import InternalError, NaruError
from naru_worker.adapters.models.decoder import DecoderWeights, forward, load_weights
from naru_worker.adapters.ops.cuda.checkpoint_weights import DeviceWeights
from naru_worker.adapters.ops.cuda.device import GpuDevice, open_gpu_memory
from naru_worker.adapters.ops.cuda.host_sampler import HostSampler
from naru_worker.adapters.ops.cuda.kernels.copy_blocks import copy_blocks
from naru_worker.adapters.ops.cuda.kv_views import block_bytes, element_type, layer_caches
from naru_worker.adapters.ops.cuda.memory.kv_blocks import KVBlocks
from naru_worker.adapters.ops.cuda.ops import CudaOps
from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.step_tensors import step_arrays, step_tensors
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.weights.checkpoint import Checkpoint


class CudaRunner:
    """A loaded model. Not thread-safe: one engine thread calls it."""

    def __init__(self, gpu: GpuDevice, checkpoint: Checkpoint, options: RunnerOptions, weight_bytes: int) -> None:
        """Packs the weights and allocates the KV cache.

        Raises:
            LoadError: a tensor is missing or does not fit the config, or the GPU has no room for the weights.
            OutOfDeviceMemory: it has none for the KV cache.
        """
        config = checkpoint.config
        self.config = config
        self.kv = KVConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
        )
        self.weight_bytes = weight_bytes
        self.max_wait_s = 0.0
        self._gpu = gpu
        dtype = element_type(options.kv_format, gpu.activation_dtype)
        num_bytes = block_bytes(self.kv, dtype)
        self.kv_bytes = options.num_blocks * num_bytes
        self._weights: DecoderWeights | None = load_weights(DeviceWeights(gpu), checkpoint)  # type: ignore[arg-type]
        arena = open_gpu_memory().make_arena(self.kv_bytes)
        try:
            self._kv_blocks = KVBlocks(arena, options.num_blocks, num_bytes)
        except NaruError:
            arena.close()
            raise
        blocks = arena.tensor(0, (options.num_blocks, num_bytes), torch.uint8)
        self._words = blocks.view(torch.int32)
        self._ops: CudaOps | None = CudaOps(gpu, self.kv, layer_caches(blocks, self.kv, dtype), options.max_model_len)
        self._staging = Staging(gpu.torch_device)
        self._sampler = HostSampler()

    @property
    def is_ready(self) -> bool:
        """Always: a runner is made with all its weights."""
        return True

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample.

        Raises:
            InternalError: the runner is closed.
            OutOfDeviceMemory: there is no room for a block that the step writes to; nothing was computed.
        """
        with torch.inference_mode():
            # The masks are waited for while the forward pass runs.
            logits = self._forward(batch)
            output = self._sampler.sample(logits, sampling)
            if not sampling.wants_hidden:
                return output
            assert self._ops is not None, "it has just computed"
            return replace(output, hidden=self._ops.normed.float().cpu().numpy())

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Copies and forward, (R, vocab).

        Raises:
            InternalError: the runner is closed.
        """
        with torch.inference_mode():
            result: FloatArray = self._forward(batch).float().cpu().numpy()
        return result

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Gives the memory of KV blocks back to the pool of all models: the whole chunks inside. Their content is void.

        Raises:
            InternalError: the blocks lie outside the cache, or the runner is closed.
        """
        if not 0 <= first_block <= first_block + num_blocks <= self.kv.num_blocks:
            raise InternalError(
                f"blocks [{first_block}, {first_block + num_blocks}) lie outside the {self.kv.num_blocks} of the cache"
            )
        if self._ops is None:
            raise InternalError("the runner is closed")
        self._kv_blocks.release(first_block, num_blocks)

    def close(self) -> None:
        """Gives back all memory. The runner is dead afterwards."""
        self._ops = self._weights = None
        self._words = torch.empty(0, dtype=torch.int32)
        self._kv_blocks.arena.close()

    def _forward(self, batch: BatchInputs) -> Tensor:
        if self._ops is None or self._weights is None:
            raise InternalError("the runner is closed")
        self._kv_blocks.ensure_for(batch, self.kv.block_size)
        step = step_arrays(batch)
        tensors = self._staging.put({**step.arrays, "copies": batch.copies})
        self._copy(tensors["copies"], batch.copies)
        self._ops.begin(step_tensors(step, tensors))
        logits: Tensor = forward(self._ops, self.config, self._weights)  # type: ignore[arg-type]
        return logits

    def _copy(self, pairs: Tensor, on_host: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> None:
        """In as few launches as keep the order: within one, no block that is written is read, or written again."""
        start, read, written = 0, set[int](), set[int]()
        for i, (source, destination) in enumerate(on_host.tolist()):
            if source in written or destination in written or destination in read:
                copy_blocks(self._words, pairs[start:i])
                start, read, written = i, set(), set()
            read.add(source)
            written.add(destination)
        copy_blocks(self._words, pairs[start:])
