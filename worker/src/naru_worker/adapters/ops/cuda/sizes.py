"""Bytes on the GPU that a model takes beside weights and KV cache, known before anything of it is there.

Two kinds: the activations of a step, which torch's allocator hands on from model to model (`workspace_bytes`), and what
each loaded model has for itself and keeps while it sleeps (`device_bytes`).
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.checkpoint_weights import Fp8Products
from naru_worker.adapters.ops.cuda.device import GpuDevice
from naru_worker.adapters.ops.cuda.experts import mixing_bytes
from naru_worker.adapters.ops.cuda.graphs import (
    MAX_CELLS,
    MAX_GRAPH_BYTES,
    NUM_ROWS,
    GraphLimits,
    input_bytes,
)
from naru_worker.adapters.ops.cuda.kernels.attention_decode import decode_partials_shape, split_tokens
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import product_bytes
from naru_worker.adapters.ops.cuda.kernels.sampler import SamplerSpace
from naru_worker.adapters.ops.cuda.kv_views import element_type
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingLayout
from naru_worker.adapters.ops.cuda.staging import FIRST_BYTES, grown_bytes
from naru_worker.adapters.ops.protocol import RunnerOptions
from naru_worker.core.model_config import ModelConfig

_GRAPH_SHARE = 32
"""All graphs of one model take at most this part of the GPU."""
_GRAPH_SLACK = 4
"""Graphs take turns in one pool, which then has what the largest of them needs: twice that for the allocator's whole
segments, and twice again for what is in use at its border."""
_MIN_GRAPH_BYTES = 64 << 20
"""The allocator takes 2 to 20 MiB at a time, for each size of its own."""


def workspace_bytes(gpu: GpuDevice, config: ModelConfig, options: RunnerOptions, products: Fp8Products) -> int:
    """About the activations of the largest step: torch's allocator takes and keeps them."""
    logits = options.max_num_seqs * config.vocab_size * gpu.activation_dtype.itemsize
    partials = _partial_bytes(gpu, config, options, options.max_num_seqs)
    mixing = mixing_bytes(options.max_num_tokens, config, gpu.activation_dtype.itemsize)
    product = _product_bytes(products, options.max_num_tokens, options.max_num_seqs)
    return options.max_num_tokens * _token_bytes(gpu, config) + product + mixing + partials + logits


def device_bytes(gpu: GpuDevice, config: ModelConfig, options: RunnerOptions, products: Fp8Products) -> int:
    """Of each loaded model: its graphs, at most, where they write their logits, its sampler, and what steps read.

    Penalties count as many tokens as a step has; texts that are penalised far longer take more.
    """
    limits = graph_limits(gpu, config, options, products)
    logits = limits.max_rows * config.vocab_size * gpu.activation_dtype.itemsize
    rotations = 0 if config.rope is None else 4 * options.max_model_len * config.rope.rotary_dim
    return (
        limits.max_bytes
        + input_bytes(limits.max_rows)
        + _table_bytes(options)
        + logits
        + rotations
        + _sampler_bytes(config, options)
        + grown_bytes(_step_bytes(options))
    )


def graph_limits(gpu: GpuDevice, config: ModelConfig, options: RunnerOptions, products: Fp8Products) -> GraphLimits:
    """Which graphs a model may have: so many bytes as its largest graphs may need, and a small part of the GPU."""
    max_rows = min(options.max_num_seqs, NUM_ROWS[-1])
    products_bytes = _product_bytes(products, max_rows, max_rows)
    products_bytes += mixing_bytes(max_rows, config, gpu.activation_dtype.itemsize)
    largest = max_rows * _token_bytes(gpu, config) + products_bytes + _partial_bytes(gpu, config, options, max_rows)
    most = min(MAX_GRAPH_BYTES, gpu.total_bytes // _GRAPH_SHARE) if gpu.total_bytes else MAX_GRAPH_BYTES
    return GraphLimits(
        max_rows, options.max_model_len, max_bytes=min(most, max(_MIN_GRAPH_BYTES, _GRAPH_SLACK * largest))
    )


def _token_bytes(gpu: GpuDevice, config: ModelConfig) -> int:
    """Activations of one token in the widest layer, all of them alive at once."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (4 * config.hidden_size + 2 * qkv + 3 * config.intermediate_size) * gpu.activation_dtype.itemsize


def _product_bytes(products: Fp8Products, num_tokens: int, num_logits: int) -> int:
    """Of the widest product of 8-bit floats: there is one at a time."""
    return max(product_bytes(num_tokens, products.layer_width), product_bytes(num_logits, products.head_width))


def _partial_bytes(gpu: GpuDevice, config: ModelConfig, options: RunnerOptions, num_rows: int) -> int:
    """Partial sums of attention over generated rows; more than graphs may have is left to the step that needs it."""
    cache = element_type(options.kv_format, gpu.activation_dtype)
    split = split_tokens(config.head_dim, cache.itemsize)
    cells = min(num_rows * options.max_model_len, max(MAX_CELLS, num_rows * split))
    shape = decode_partials_shape(1, config.num_heads, config.head_dim, -(-cells // split))
    return 4 * math.prod(shape)


def _sampler_bytes(config: ModelConfig, options: RunnerOptions) -> int:
    rows = options.max_num_seqs
    space = SamplerSpace.make(rows, config.vocab_size, 0, "meta")
    tensors = [value for value in (getattr(space, field.name) for field in fields(space)) if isinstance(value, Tensor)]
    layout = SamplingLayout(
        num_rows=rows,
        num_biases=rows,
        num_penalties=options.max_num_tokens,
        num_banned=rows,
        num_masks=rows,
        words_per_mask=-(-config.vocab_size // 32),
    )
    drawn = rows * torch.int32.itemsize
    return sum(tensor.nbytes for tensor in tensors) + grown_bytes(layout.num_bytes) + drawn


def _step_bytes(options: RunnerOptions) -> int:
    """Of the numbers that a plain step reads: of tokens, of sequences, and their tables of blocks, at most twice."""
    columns = -(-options.max_model_len // options.block_size)
    return 4 * (6 * options.max_num_tokens + options.max_num_seqs * (4 + columns))


def _table_bytes(options: RunnerOptions) -> int:
    """The tables of blocks of all sequences, and the buffer that their news comes in."""
    return 4 * options.max_num_seqs * -(-options.max_model_len // options.block_size) + FIRST_BYTES
