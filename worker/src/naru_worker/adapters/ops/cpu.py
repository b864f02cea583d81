"""The `cpu` backend: a model as native weights, a native KV cache and a recorded tape; one native call per step.

Loaded by name like any backend (`load_runner`, `weight_bytes`, `kv_block_bytes`). Imports no torch.

A token's result depends on its kind (prompt or generated) and on its sequence alone, bit for bit: batch mates, chunks,
the number of threads and a cached prefix of prompt tokens change nothing. The two kinds take different ways, since
prompts come in many rows: on `amx` prompts meet quantized weights, and a half-precision cache, as bf16 and generated
tokens as bytes; elsewhere only the order of attention's sums differs. Hence the one limit: tokens that an earlier
answer left in the cache keep the numbers they were generated with when a later prompt reuses them.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.models.decoder import forward, load_weights
from naru_worker.adapters.ops.cpu_batch import (
    address,
    broken_rule,
    sampling_inputs,
    sampling_outputs,
    step_inputs,
)
from naru_worker.adapters.ops.cpu_ops import CpuOps, WeightSizer
from naru_worker.adapters.ops.native_lib import ModelSpec, SamplingInputs, best_isa, load_best, load_variant
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    KVConfig,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.rope import inverse_frequencies

_ELEMENT_BYTES = {"f16": 2, "f32": 4}
_LANES = 16
"""Keys span tokens and values span dimensions in registers of this many floats."""


def isa() -> str:
    """The instruction set in use, for status and logs.

    Raises:
        LoadError: the kernels cannot be built, or the environment forces a variant that cannot run here.
    """
    return best_isa()


def load_runner(checkpoint: Checkpoint, options: RunnerOptions, variant: str | None = None) -> CpuRunner:
    """Packs the weights, reserves the KV cache, records the tape. The checkpoint may be closed afterwards.

    `variant` picks an instruction set by name, for tests; None takes the best.

    Raises:
        LoadError: a tensor does not fit the config, an option is out of range, or there is not enough memory.
    """
    library = load_best() if variant is None else load_variant(variant)
    return CpuRunner(library, checkpoint, options)


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the packed weights.

    Raises:
        LoadError: a tensor does not fit the config, or the kernels cannot be built.
    """
    sizer = _sized(load_best(), checkpoint)
    return sizer.arena_bytes + sizer.vector_bytes


def kv_block_bytes(config: ModelConfig, options: RunnerOptions) -> int:
    """Bytes of one KV block over all layers; values are padded to whole registers."""
    padded = -(-config.head_dim // _LANES) * _LANES
    elements = config.num_layers * config.num_kv_heads * options.block_size * (config.head_dim + padded)
    return elements * _ELEMENT_BYTES[options.kv_format]


def _sized(library: ctypes.CDLL, checkpoint: Checkpoint) -> WeightSizer:
    sizer = WeightSizer(library)
    load_weights(sizer, checkpoint)  # type: ignore[arg-type]  # only the weight half of the protocol is called
    return sizer


def _check(config: ModelConfig, options: RunnerOptions) -> None:
    rope = config.rope
    limits: list[tuple[str, int, bool]] = [
        ("block_size", options.block_size, options.block_size > 0 and options.block_size % _LANES == 0),
        ("num_blocks", options.num_blocks, 1 < options.num_blocks < 2**31 // max(1, options.block_size)),
        ("max_num_tokens", options.max_num_tokens, options.max_num_tokens >= 1),
        ("max_num_seqs", options.max_num_seqs, options.max_num_seqs >= 1),
        ("max_model_len", options.max_model_len, options.max_model_len >= 1),
        ("num_threads", options.num_threads, 1 <= options.num_threads <= 1024),
        ("num_heads", config.num_heads, config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads == 0),
        ("head_dim", config.head_dim, config.head_dim >= 1),
        (
            "rotary_dim",
            0 if rope is None else rope.rotary_dim,
            rope is None or (rope.rotary_dim % 2 == 0 and 2 <= rope.rotary_dim <= config.head_dim),
        ),
    ]
    for name, value, is_fine in limits:
        if not is_fine:
            raise LoadError(f"{name} is {value!r}, which the cpu backend cannot serve (block_size: a multiple of 16)")


class CpuRunner:
    """A loaded model. Not thread-safe: one engine thread calls it."""

    def __init__(self, library: ctypes.CDLL, checkpoint: Checkpoint, options: RunnerOptions) -> None:
        """Packs and records; see `load_runner`."""
        config = checkpoint.config
        _check(config, options)
        sizer = _sized(library, checkpoint)
        self.kv = KVConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
        )
        self.weight_bytes = sizer.arena_bytes + sizer.vector_bytes
        self.kv_bytes = options.num_blocks * kv_block_bytes(config, options)
        self._library = library
        self._vocab_size = config.vocab_size
        self._sampling: SamplingBatch | None = None
        self._sampling_inputs = SamplingInputs()
        self._sampling_arrays: list[object] = []
        self._model: int | None = self._create(config, options, sizer.arena_bytes)
        try:
            self._record(checkpoint)
        except BaseException:
            self.close()
            raise

    def _create(self, config: ModelConfig, options: RunnerOptions, arena_bytes: int) -> int:
        rope = config.rope
        frequencies = np.array(inverse_frequencies(rope) if rope is not None else (), np.float64)
        spec = ModelSpec(
            weight_bytes=arena_bytes,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            kv_element_bytes=_ELEMENT_BYTES[options.kv_format],
            max_num_tokens=options.max_num_tokens,
            max_num_seqs=options.max_num_seqs,
            # Learned positions end somewhere; a batch beyond is refused.
            max_model_len=(
                min(options.max_model_len, config.max_position_embeddings) if rope is None else options.max_model_len
            ),
            num_threads=min(options.num_threads, 4 * (os.cpu_count() or 1)),
            rotary_dim=0 if rope is None else rope.rotary_dim,
            rope_factor=1.0 if rope is None else rope.attention_factor,
        )
        model = self._library.naru_model_new(ctypes.byref(spec), address(frequencies))
        if not model:
            raise LoadError(
                f"not enough memory for {arena_bytes} bytes of weights and {self.kv_bytes} bytes of KV cache; "
                "lower num_blocks"
            )
        return int(model)

    def _record(self, checkpoint: Checkpoint) -> None:
        assert self._model is not None
        config = checkpoint.config
        ops = CpuOps(self._library, self._model, config.head_dim, config.num_kv_heads)
        weights = load_weights(ops, checkpoint)
        for name, table, rows in (
            ("embed", weights.embed, config.vocab_size),
            ("lm_head", weights.lm_head, config.vocab_size),
            ("pos_embed", weights.pos_embed, config.max_position_embeddings),
        ):
            if table is not None and (table.num_rows != rows or table.num_columns != config.hidden_size):
                raise LoadError(
                    f"tensor {name!r} has shape {(table.num_rows, table.num_columns)!r}; "
                    f"{(rows, config.hidden_size)!r} is needed"
                )
        forward(ops, config, weights)
        ops.finish()

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample.

        Raises:
            InternalError: the batch breaks a rule of the protocol; nothing was computed or written.
        """
        model = self._alive()
        self._library.naru_wake(model)
        inputs, arrays = step_inputs(batch)
        num_rows = inputs.num_rows
        if sampling is not self._sampling or num_rows != len(sampling.target):
            self._sampling_inputs, alive = sampling_inputs(sampling, num_rows)
            self._sampling, self._sampling_arrays = sampling, list(alive)
        output, outputs = sampling_outputs(num_rows, max(0, sampling.max_logprobs))
        code = self._library.naru_step(
            model, ctypes.byref(inputs), ctypes.byref(self._sampling_inputs), ctypes.byref(outputs), None
        )
        del arrays
        if code != 0:
            raise broken_rule(code)
        return output

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Copies and forward, (R, vocab).

        Raises:
            InternalError: the batch breaks a rule of the protocol; nothing was computed or written.
        """
        model = self._alive()
        inputs, arrays = step_inputs(batch)
        result = np.empty((inputs.num_rows, self._vocab_size), np.float32)
        code = self._library.naru_step(model, ctypes.byref(inputs), None, None, address(result))
        del arrays
        if code != 0:
            raise broken_rule(code)
        return result

    def close(self) -> None:
        """Gives back all memory. The runner is dead afterwards."""
        model, self._model = self._model, None
        if model is not None:
            self._library.naru_model_free(model)

    def _alive(self) -> int:
        if self._model is None:
            raise InternalError("the runner is closed")
        return self._model
