"""What a model will need on the CPU, known before anything is loaded: its sizes checked, bytes of cache and workspace.

Called by the CPU backend and by whoever plans memory. Loads no weights.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.models.decoder import forward, load_weights
from naru_worker.adapters.ops.cpu_device import effective_threads
from naru_worker.adapters.ops.cpu_image import NamedTensors, UnloadedWeights
from naru_worker.adapters.ops.cpu_ops import TapeRecorder
from naru_worker.adapters.ops.native_lib import ModelSpec
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.core.model_config import ModelConfig, RopeConfig
from naru_worker.core.rope import inverse_frequencies

_ELEMENT_BYTES = {"int8": 1, "f16": 2, "f32": 4}
_SCALE_BYTES = 4
_LANES = 16
"""Keys span tokens and values span dimensions in registers of this many floats."""


def kv_block_bytes(config: ModelConfig, options: RunnerOptions) -> int:
    """Bytes of one KV block over all layers; values, and keys of bytes, are padded to whole registers."""
    padded = -(-config.head_dim // _LANES) * _LANES
    if options.kv_format == "int8":
        token_bytes = 2 * (padded + _SCALE_BYTES)
    else:
        token_bytes = (config.head_dim + padded) * _ELEMENT_BYTES[options.kv_format]
    return config.num_layers * config.num_kv_heads * options.block_size * token_bytes


def workspace_bytes(library: ctypes.CDLL, config: ModelConfig, options: RunnerOptions) -> int:
    """Bytes of the shared workspace that a step of this model uses: exactly what a loaded one will claim.

    Raises:
        LoadError: a size is out of range.
    """
    check_sizes(config, options)
    tape = TapeRecorder(config.head_dim, config.num_kv_heads)
    weights = load_weights(UnloadedWeights(), NamedTensors(config))  # type: ignore[arg-type]  # each is half a protocol
    forward(tape, config, weights)  # type: ignore[arg-type]
    buffers = tape.buffer_specs()
    spec = model_spec(config, options, 0)
    return int(library.naru_workspace_bytes(ctypes.byref(spec), buffers, len(buffers)))


def check_sizes(config: ModelConfig, options: RunnerOptions) -> None:
    """Refuses what the kernels cannot compute.

    Raises:
        LoadError: names the size and its value.
    """
    rope = config.rope
    limits: list[tuple[str, int, bool]] = [
        ("block_size", options.block_size, options.block_size % _LANES == 0),
        ("num_blocks", options.num_blocks, 1 < options.num_blocks < 2**31 // max(1, options.block_size)),
        ("max_num_tokens", options.max_num_tokens, True),
        ("max_num_seqs", options.max_num_seqs, True),
        ("max_model_len", options.max_model_len, True),
        ("vocab_size", config.vocab_size, True),
        ("hidden_size", config.hidden_size, True),
        ("intermediate_size", config.intermediate_size, True),
        ("max_position_embeddings", config.max_position_embeddings, True),
        ("num_layers", config.num_layers, len(config.sliding_windows) in (0, config.num_layers)),
        ("num_kv_heads", config.num_kv_heads, True),
        ("num_heads", config.num_heads, config.num_heads % max(1, config.num_kv_heads) == 0),
        ("head_dim", config.head_dim, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim < 2**31),
    ]
    if rope is not None:
        limits.append(("rotary_dim", rope.rotary_dim, rope.rotary_dim % 2 == 0 and rope.rotary_dim <= config.head_dim))
    for name, value, is_fine in limits:
        if not is_fine or not 1 <= value < 2**31:
            raise LoadError(f"{name} is {value!r}, which the cpu backend cannot serve (block_size: a multiple of 16)")
    if not all(window is None or 1 <= window < 2**31 for window in config.sliding_windows):
        raise LoadError(f"sliding_windows is {config.sliding_windows!r}; each must be None or from 1 to 2**31 - 1")


def model_spec(config: ModelConfig, options: RunnerOptions, packed_bytes: int) -> ModelSpec:
    """The sizes as native code wants them. `packed_bytes`: of weights to be packed, 0 with an image."""
    rope = config.rope
    return ModelSpec(
        weight_bytes=packed_bytes,
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
        num_threads=effective_threads(options.num_threads),
        rotary_dim=0 if rope is None else rope.rotary_dim,
        rope_factor=1.0 if rope is None else rope.attention_factor,
    )


def rope_frequencies(rope: RopeConfig | None) -> npt.NDArray[np.float64]:
    """Radians per position of each rotated pair; empty without rotation.

    Raises:
        LoadError: the rope settings give no numbers.
    """
    try:
        frequencies = inverse_frequencies(rope) if rope is not None else ()
        if rope is None or (len(frequencies) == rope.rotary_dim // 2 and all(map(math.isfinite, frequencies))):
            return np.array(frequencies, np.float64)
    except (ArithmeticError, TypeError, ValueError):
        pass
    raise LoadError(f"the rope settings give no rotation: {rope!r}")
