"""A model on the CPU: native weights, a native KV cache and a recorded tape; one native call per step.

Made by `adapters/ops/cpu`, called by the engine thread. Other threads may tell it how much of its image is present.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from naru_proto.errors import InternalError, LoadError, NaruError
from naru_worker.adapters.models.decoder import forward, load_weights
from naru_worker.adapters.ops.cpu_batch import (
    StepOutputs,
    address,
    broken_rule,
    sampling_inputs,
    step_inputs,
)
from naru_worker.adapters.ops.cpu_device import CpuDevice
from naru_worker.adapters.ops.cpu_image import ImageWeights, NamedTensors
from naru_worker.adapters.ops.cpu_ops import TapeRecorder
from naru_worker.adapters.ops.cpu_pack import PackedMatrix, PackedWeights
from naru_worker.adapters.ops.cpu_sizes import check_sizes, kv_block_bytes, model_spec, rope_frequencies
from naru_worker.adapters.ops.native_lib import SamplingInputs, StepInputs
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
    WeightsPending,
)
from naru_worker.adapters.ops.weights_image import WeightsImage
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.model_config import ModelConfig

_PENDING, _FAILED = -30, -31
"""Results of a native step, beside those of a broken batch."""


class CpuRunner:
    """A loaded model. Not thread-safe: one engine thread calls it; exceptions say so."""

    def __init__(
        self, device: CpuDevice, config: ModelConfig, options: RunnerOptions, weight_bytes: int, packed_bytes: int
    ) -> None:
        """An empty model; `pack` or `point_at` gives it weights.

        Raises:
            LoadError: a size is out of range, or there is not enough memory.
        """
        check_sizes(config, options)
        self.kv = KVConfig.of(config, options)
        self.weight_bytes = weight_bytes
        self.kv_bytes = options.num_blocks * kv_block_bytes(config, options)
        self.max_wait_s = 0.0
        self._num_ready_bytes = self._num_needed_bytes = 0
        """How long a step waits for weights that are still being read in."""
        self._library = device.library
        self._config = config
        self._image: WeightsImage | None = None
        self._failure: NaruError | None = None
        self._sampling: SamplingBatch | None = None
        self._sampling_inputs = SamplingInputs()
        self._sampling_arrays: list[object] = []
        self._batch: BatchInputs | None = None
        self._inputs = StepInputs()
        self._input_arrays: list[object] = []
        self._outputs = StepOutputs()
        self._lock = threading.Lock()  # the model may not end while another thread tells it of weights
        spec = model_spec(config, options, packed_bytes)
        frequencies = rope_frequencies(config.rope)
        self._model: int | None = self._library.naru_model_new(device.handle, ctypes.byref(spec), address(frequencies))
        if not self._model:
            raise LoadError(
                f"not enough memory for {packed_bytes} bytes of weights and {self.kv_bytes} bytes of KV cache; "
                "lower num_blocks"
            )

    def pack(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint's weights, packed; closes the runner when that fails.

        Raises:
            LoadError: a tensor does not fit the config.
        """
        self._record(PackedWeights(self._library, self._alive()), checkpoint)

    def point_at(self, image: WeightsImage, ready_bytes: int | None, max_wait_s: float) -> None:
        """Uses the weights of an image where they lie; closes the runner when that fails.

        Raises:
            LoadError: a tensor does not fit the config or the image.
        """
        self.max_wait_s = max_wait_s
        self._image = image
        self._record(ImageWeights(self._library, self._alive(), image), NamedTensors(self._config))
        if ready_bytes is not None:
            self._library.naru_start_from(self._model, max(0, ready_bytes))
            self._num_ready_bytes = ready_bytes
            self._num_needed_bytes = image.num_bytes

    def _record(self, halves: Any, tensors: Any) -> None:
        """`halves`: the weight half of the protocol; the tape is the other."""
        config = self._config
        try:
            weights = load_weights(halves, tensors)
            for name, table, rows in (
                ("embed", weights.embed, config.vocab_size),
                ("lm_head", weights.lm_head, config.vocab_size),
                ("pos_embed", weights.pos_embed, config.max_position_embeddings),
            ):
                if table is not None:
                    _check_table(name, table, (rows, config.hidden_size))
            tape = TapeRecorder(config.head_dim, config.num_kv_heads)
            forward(tape, config, weights)  # type: ignore[arg-type]  # the graph half is all it calls
            tape.finish(self._library, self._alive())
        except BaseException:
            self.close()
            raise

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample.

        Raises:
            WeightsPending: weights are still missing after `max_wait_s`; nothing was drawn or copied.
            InternalError: the batch breaks a rule of the protocol; nothing was computed or written.
            NaruError: the load failed; see `fail`.
        """
        model = self._alive()
        self._library.naru_wake(model)
        if batch is not self._batch:  # the same object: the same arrays, with new contents
            self._batch = None
            self._inputs, alive = step_inputs(batch)
            self._batch, self._input_arrays = batch, list(alive)
        num_rows = self._inputs.num_rows
        if sampling is not self._sampling or num_rows != len(sampling.target):
            self._sampling = None
            self._sampling_inputs, alive = sampling_inputs(sampling, num_rows)
            self._sampling, self._sampling_arrays = sampling, list(alive)
        hidden_size = self._config.hidden_size if sampling.wants_hidden else 0
        output, outputs = self._outputs.take(num_rows, max(0, sampling.max_logprobs), hidden_size)
        self._finish_step(
            self._library.naru_step(
                model,
                ctypes.byref(self._inputs),
                ctypes.byref(self._sampling_inputs),
                ctypes.byref(outputs),
                None,
                int(self.max_wait_s * 1e9),
            )
        )
        return output

    @property
    def is_ready(self) -> bool:
        """Whether all weights are there, or never will be."""
        return self._failure is not None or self._num_ready_bytes >= self._num_needed_bytes

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Copies and forward, (R, vocab).

        Raises:
            NaruError, WeightsPending: see `run`.
        """
        model = self._alive()
        inputs, arrays = step_inputs(batch)
        result = np.empty((inputs.num_rows, self._config.vocab_size), np.float32)
        self._finish_step(
            self._library.naru_step(
                model, ctypes.byref(inputs), None, None, address(result), int(self.max_wait_s * 1e9)
            )
        )
        del arrays
        return result

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Gives the memory of KV blocks back to the machine: the whole pages inside. Their content is void.

        Raises:
            InternalError: the blocks lie outside the cache.
        """
        self.kv.check_range(first_block, num_blocks)
        self._library.naru_release_blocks(self._alive(), first_block, num_blocks)

    def set_ready_bytes(self, num_bytes: int) -> None:
        """The first so many bytes of the image are present; never fewer than before. Any thread, even when closed."""
        with self._lock:
            if self._model is not None:
                self._library.naru_set_ready(self._model, max(0, num_bytes))
                self._num_ready_bytes = max(self._num_ready_bytes, num_bytes)

    def fail(self, error: NaruError | None = None) -> None:
        """No more weights will come: a step that waits for some ends with the error. Any thread, even when closed."""
        with self._lock:
            if self._model is not None:
                self._failure = error or LoadError("the model's weights could not be read; load the model again")
                self._library.naru_fail(self._model)

    def close(self) -> None:
        """Gives back all memory. The runner is dead afterwards."""
        with self._lock:
            model, self._model = self._model, None
            if model is not None:
                self._library.naru_model_free(model)
        self._image = None

    def _finish_step(self, code: int) -> None:
        if code == 0:
            return
        if code == _PENDING:
            raise WeightsPending(f"weights are still missing after {self.max_wait_s} s")
        if code == _FAILED and self._failure is not None:
            raise self._failure
        raise broken_rule(code)

    def _alive(self) -> int:
        if self._model is None:
            raise InternalError("the runner is closed")
        return self._model


def _check_table(name: str, table: PackedMatrix, shape: tuple[int, int]) -> None:
    if (table.num_rows, table.num_columns) != shape:
        raise LoadError(f"tensor {name!r} has shape {(table.num_rows, table.num_columns)!r}; {shape!r} is needed")
