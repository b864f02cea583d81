"""A model on a GPU. A step has two halves: `launch` gives the device its work, `fetch` waits for what was drawn.

Made by `backend`, called by the engine thread. Between the halves the next step may be launched, whose tokens are taken
from this one's on the device; `run` is both halves at once.

    launch: staged inputs ─► forward (kernel by kernel, or a graph) ─► sampler ─► results to pinned memory    fetch
            compute stream ──────────────────────────────────────────────────┘    copy stream ──────────────────┘
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from naru_proto.errors import InternalError, LoadError, NaruError, Unavailable
from naru_worker.adapters.models.decoder import DecoderWeights, forward, load_weights
from naru_worker.adapters.ops.cuda.checkpoint_weights import DeviceWeights
from naru_worker.adapters.ops.cuda.device import GpuDevice, open_gpu_memory, open_upload_slots
from naru_worker.adapters.ops.cuda.device_sampler import DeviceSampler, Sampled
from naru_worker.adapters.ops.cuda.faults import told_apart
from naru_worker.adapters.ops.cuda.graphs import DecodeGraphs, NoGraph, graph_key
from naru_worker.adapters.ops.cuda.kernels.copy_blocks import copy_blocks
from naru_worker.adapters.ops.cuda.kernels.drawn_tokens import fill_drawn_tokens
from naru_worker.adapters.ops.cuda.kv_views import block_bytes, element_type, layer_caches
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory
from naru_worker.adapters.ops.cuda.memory.kv_blocks import KVBlocks
from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool
from naru_worker.adapters.ops.cuda.memory.weight_space import Send, WeightSpace
from naru_worker.adapters.ops.cuda.ops import CudaOps
from naru_worker.adapters.ops.cuda.sizes import graph_limits
from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.step_tensors import (
    StepTensors,
    num_generated_sequences,
    step_arrays,
    step_tensors,
)
from naru_worker.adapters.ops.cuda.streams import Event, Streams, open_streams
from naru_worker.adapters.ops.cuda.table_twin import TableTwin
from naru_worker.adapters.ops.device_stats import DeviceStats
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


class CudaRunner:
    """A loaded model. Not thread-safe: one engine thread calls it."""

    def __init__(
        self,
        gpu: GpuDevice,
        checkpoint: Checkpoint,
        options: RunnerOptions,
        weight_bytes: int,
        streams: Streams | None = None,
    ) -> None:
        """Packs the weights and allocates the KV cache. `streams`: None: the device's.

        The weights of one matrix are on their way to the GPU while the next one is packed. Whatever goes wrong, nothing
        is held.

        Raises:
            LoadError: a tensor is missing or does not fit the config, or the GPU has no room for the weights.
            Unavailable: it has none for the KV cache, or for what steps need.
            DeviceError: the device failed.
            Exception: whatever the checkpoint raises.
        """
        config = checkpoint.config
        self.config = config
        self.kv = KVConfig.of(config, options)
        self.weight_bytes = weight_bytes
        self.max_wait_s = 0.0
        self._gpu = gpu
        dtype = element_type(options.kv_format, gpu.activation_dtype)
        num_bytes = block_bytes(self.kv, dtype)
        self.kv_bytes = options.num_blocks * num_bytes
        self._streams = open_streams(gpu.torch_device) if streams is None else streams
        with contextlib.ExitStack() as undo:
            self._space = _space_for(gpu, weight_bytes, config.num_layers, self._streams)
            undo.callback(self._space.close)
            packing = DeviceWeights(gpu, self._space.place)
            weights = load_weights(packing, checkpoint)  # type: ignore[arg-type]
            self._space.finish()
            for note, count in packing.notes.items():
                _log.info("%s (%d matrices)", note, count)
            arena = open_gpu_memory().make_arena(self.kv_bytes)
            undo.callback(arena.close)
            self._kv_blocks = KVBlocks(arena, options.num_blocks, num_bytes)
            blocks = arena.tensor(0, (options.num_blocks, num_bytes), torch.uint8)
            with told_apart("a load", "what the steps of a model need"):
                self._staging = Staging(gpu.torch_device, self._streams)
                self._sampler = DeviceSampler(gpu.torch_device, self._streams, options.max_num_seqs)
                self._table = TableTwin(
                    gpu.torch_device, self._streams, options.max_num_seqs, options.max_model_len, options.block_size
                )
            undo.pop_all()
        self._weights: DecoderWeights | None = weights
        self._words = blocks.view(torch.int32)
        self._ops: CudaOps | None = CudaOps(gpu, self.kv, layer_caches(blocks, self.kv, dtype), options.max_model_len)
        limits = graph_limits(gpu, config, options, packing.products)
        self.graphs = DecodeGraphs(gpu.torch_device, self._streams, self._table.tensor, limits, self._compute_rows)
        self._logits: Tensor | None = None
        self.plain_steps: Counter[NoGraph] = Counter()
        """Steps that were launched kernel by kernel, by the reason."""

    @property
    def is_ready(self) -> bool:
        """Always: a runner is made with all its weights."""
        return True

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample.

        Raises:
            InternalError: the runner is closed.
            Unavailable: the GPU has no room for what the step writes to or computes; nothing was launched.
            DeviceError: the device failed.
        """
        return self.fetch(self.launch(batch, sampling))

    def launch(self, batch: BatchInputs, sampling: SamplingBatch) -> Sampled:
        """Gives the device a step, and waits for nothing but the masks; the arrays may change after the call.

        Up to two steps may be launched and not yet fetched. Raises as `run`.
        """
        try:
            with torch.inference_mode(), told_apart("a launch", f"a step of {len(batch.token_ids)} tokens"):
                logits, token_ids = self._forward(batch, wants_hidden=sampling.wants_hidden)
                hidden = (self.config.hidden_size, self._normed) if sampling.wants_hidden else None
                # The masks are waited for while the forward pass runs.
                is_ahead = batch.token_ids.min(initial=0) < 0
                return self._sampler.launch(logits, sampling, hidden, token_ids if is_ahead else None)
        except Unavailable:
            self._gpu.release()  # torch may lack what the pool only keeps: the next step finds it
            raise

    def fetch(self, step: Sampled) -> SampleOutput:
        """What a launched step drew; waits for that step only. In the order of launches.

        Raises:
            DeviceError: the device failed.
        """
        return self._sampler.fetch(step)

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Copies and forward, (R, vocab).

        Raises:
            InternalError: the runner is closed.
            Unavailable: the GPU has no room for what the step writes to or computes.
            DeviceError: the device failed.
        """
        with torch.inference_mode(), told_apart("a launch", f"a step of {len(batch.token_ids)} tokens"):
            logits, _ = self._forward(batch)
            kept: list[Tensor] = []
            self._streams.compute.submit(lambda: kept.append(logits()[: len(batch.logits_rows)].float()))
            self._streams.synchronize()
            result: FloatArray = kept[0].cpu().numpy()
        return result

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Gives the memory of KV blocks back to the pool of all models: the whole chunks inside. Their content is void.

        Raises:
            InternalError: the blocks lie outside the cache, or the runner is closed.
        """
        self.kv.check_range(first_block, num_blocks)
        if self._ops is None:
            raise InternalError("the runner is closed")
        self._kv_blocks.release(first_block, num_blocks)

    def close(self) -> None:
        """Waits for what was launched, and gives back all memory. The runner is dead afterwards."""
        with contextlib.suppress(DeviceError):  # whoever fetched was told
            self._streams.synchronize()
        self.graphs.close()
        self._ops = self._weights = self._logits = None
        self._words = torch.empty(0, dtype=torch.int32)
        # Engines and runners are in cycles, which are collected late: what has memory of the GPU goes at once.
        for name in ("_sampler", "_staging", "_table"):
            self.__dict__.pop(name, None)
        self._kv_blocks.arena.close()
        self._space.close()

    def device_stats(self) -> DeviceStats:
        """How its steps were launched; may be called from any thread."""
        steps = {"replayed": self.graphs.num_replays}
        steps |= {reason.name.lower(): self.plain_steps[reason] for reason in NoGraph}
        return DeviceStats(steps, self.graphs.num_graphs, self.graphs.num_bytes, self.graphs.failure)

    @property
    def can_sleep(self) -> bool:
        """Whether sleeping gives memory to others: not where arenas are fixed buffers."""
        return not (self._space.arena.reason or self._kv_blocks.arena.reason)

    def sleep(self, pool: PinnedPool) -> int:
        """Gives the memory of weights and cache to other models; returns the bytes. Graphs and addresses stay.

        The weights go into the pool's slots; the cache is void.

        Raises:
            ValueError: the pool is too small; nothing has changed.
            NoPinnedSlot: too many of its slots are taken; nothing has changed.
            DeviceError: the device failed; it may be tried again.
        """
        self._streams.synchronize()
        num_bytes = self._space.sleep(pool)
        if not self._kv_blocks.arena.is_asleep:
            # On waking memory comes for the null block alone, and then as steps need it.
            num_bytes += self._kv_blocks.release(0, self._kv_blocks.num_blocks)
        return num_bytes + self._kv_blocks.arena.sleep()

    def wake(self) -> None:
        """Goes on where it slept, with an empty cache.

        Raises:
            OutOfDeviceMemory: there is no room; it sleeps on.
            DeviceError: the device failed; it sleeps on.
        """
        self._kv_blocks.arena.wake()
        try:
            self._space.wake()
        except NaruError:
            self._kv_blocks.arena.sleep()
            raise

    def _forward(self, batch: BatchInputs, *, wants_hidden: bool = False) -> tuple[Callable[[], Tensor], Tensor]:
        """Launches it; gives logits, at least (R, vocab), and tokens to work behind it on the stream of computation."""
        if self._ops is None or self._space.arena.is_asleep:
            raise InternalError(f"the runner is {'closed' if self._ops is None else 'asleep'}")
        self._kv_blocks.ensure_for(batch, self.kv.block_size)
        lines = self._table.take(batch, num_generated_sequences(batch))
        step = step_arrays(batch, lines, self.config.num_heads // self.config.num_kv_heads, self.kv.block_size)
        limits = self.graphs.limits
        key = NoGraph.OFF if self.graphs.failure else graph_key(batch, step, limits, wants_hidden=wants_hidden)
        if not isinstance(key, NoGraph):
            return self.graphs.launch(step, key)
        self.plain_steps[key] += 1
        tensors = self._staging.put({**step.arrays, "copies": batch.copies})
        inputs, pairs = step_tensors(step, tensors, self._table.tensor), batch.copies.tolist()
        results: list[Tensor] = []

        def work() -> None:
            self._copy(tensors["copies"], pairs)
            results.append(self._compute(inputs))

        self._streams.compute.submit(work)
        return (lambda: results[0]), inputs.token_ids

    def _compute_rows(self, step: StepTensors) -> Tensor:
        """Launches a step of a graph's shape: all graphs write their logits to the same place."""
        assert self._weights is not None, "asked before"
        if self._logits is None:
            shape = (self.graphs.limits.max_rows, self._weights.lm_head.num_rows)
            self._logits = torch.empty(shape, dtype=self._gpu.activation_dtype, device=self._gpu.torch_device)
        return self._compute(step, self._logits[: step.num_generated])

    @torch.inference_mode()
    def _compute(self, step: StepTensors, logits_out: Tensor | None = None) -> Tensor:
        """Launches the forward pass, or has it recorded."""
        assert self._ops is not None, "asked before"
        assert self._weights is not None, "they go together"
        if step.num_generated:
            fill_drawn_tokens(step.token_ids[: step.num_generated], self._sampler.drawn)
        self._ops.begin(step, logits_out)
        logits: Tensor = forward(self._ops, self.config, self._weights)  # type: ignore[arg-type]
        return logits

    def _normed(self) -> Tensor:
        assert self._ops is not None, "it has just computed"
        return self._ops.normed

    def _copy(self, pairs: Tensor, on_host: list[list[int]]) -> None:
        """In as few launches as keep the order: within one, no block that is written is read, or written again."""
        start, read, written = 0, set[int](), set[int]()
        for i, (source, destination) in enumerate(on_host):
            if source in written or destination in written or destination in read:
                copy_blocks(self._words, pairs[start:i])
                start, read, written = i, set(), set()
            read.add(source)
            written.add(destination)
        copy_blocks(self._words, pairs[start:])


def _space_for(gpu: GpuDevice, weight_bytes: int, num_layers: int, streams: Streams) -> WeightSpace:
    try:
        return WeightSpace(open_gpu_memory(), weight_bytes, num_layers, open_upload_slots(), _sender(streams))
    except OutOfDeviceMemory as exc:
        raise LoadError(
            f"{gpu.name} has no room for {weight_bytes} bytes of weights; lower memory_budget_bytes, or load fewer "
            "models"
        ) from exc


def _sender(streams: Streams) -> Send:
    """Copies beside what other models compute."""

    def send(target: Tensor, source: Tensor) -> Event:
        with told_apart("an upload", "an upload"):
            streams.copies.upload(source, target)
            return streams.copies.record()

    return send
