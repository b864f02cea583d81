"""The `ref` backend: every operation in plain torch, float32, on the CPU. The oracle of the fast backends.

Loaded by name like any backend (`load_runner`, `runner_bytes`, `kv_block_bytes`). Weights are decoded to float32, the
KV cache is paged; each operation computes at once, so the decoder runs at each step. Not meant to be fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from naru_proto.errors import InternalError
from naru_worker.adapters.models.decoder import DecoderWeights, forward, load_weights
from naru_worker.adapters.ops.protocol import (
    BatchInputs,
    FloatArray,
    HeadNorms,
    KVConfig,
    Ops,
    RawTensor,
    RunnerBytes,
    RunnerOptions,
    SampleOutput,
    SamplingBatch,
)
from naru_worker.adapters.ops.ref_dequant import dequantize
from naru_worker.adapters.ops.sampling_ref import sample
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare, watched
from naru_worker.core.model_config import Activation, ExpertsConfig, ModelConfig, NormKind, RopeConfig
from naru_worker.core.rope import inverse_frequencies
from naru_worker.core.weight_layout import expected_shapes

_KV_TYPES = {"int8": torch.int8, "f16": torch.float16, "f32": torch.float32}
_SCALE_BYTES = 4


def load_runner(checkpoint: Checkpoint, options: RunnerOptions, on_share: OnShare | None = None) -> RefRunner:
    """Decodes all weights and allocates the KV cache. Sets torch's thread count, which is the process's.

    Raises:
        LoadError: a tensor is missing or does not fit the config.
        Exception: whatever `on_share` raises, which is told of each tensor.
    """
    torch.set_num_threads(options.num_threads)
    return RefRunner(watched(checkpoint, on_share), options)


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the float32 weights."""
    names = [name for name in expected_shapes(checkpoint.config) if checkpoint.has(name)]
    return sum(4 * math.prod(checkpoint.get(name).shape) for name in names)


def kv_block_bytes(config: ModelConfig, options: RunnerOptions) -> int:
    """Bytes of one KV block over all layers."""
    values = config.kv_bytes_per_token(_KV_TYPES[options.kv_format].itemsize)
    scales = 2 * config.num_layers * config.num_kv_heads * _SCALE_BYTES if options.kv_format == "int8" else 0
    return options.block_size * (values + scales)


def runner_bytes(checkpoint: Checkpoint, options: RunnerOptions) -> RunnerBytes:
    """Weights, and about the activations of a step: torch takes and gives them back by itself."""
    config = checkpoint.config
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widths = 4 * config.hidden_size + 2 * qkv + 3 * config.widest_inner_size
    scores = config.num_heads * options.max_model_len
    workspace = 4 * options.max_num_tokens * (widths + scores + config.vocab_size)
    return RunnerBytes(weight_bytes(checkpoint), workspace)


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor
    """(out_features, in_features)"""
    bias: Tensor | None


class RefOps:
    """The operation protocol over torch tensors. `batch` is the step being computed."""

    batch: BatchInputs
    normed: Tensor
    """What the head got: (R, hidden) of the step that was computed last."""

    def __init__(self, kv: KVConfig, kv_type: torch.dtype) -> None:
        """Allocates the cache: keys and values of each layer, (num_blocks, block_size, num_kv_heads, head_dim)."""
        self.kv = kv
        shape = (2, kv.num_layers, kv.num_blocks, kv.block_size, kv.num_kv_heads, kv.head_dim)
        self.cache = torch.zeros(shape, dtype=kv_type)
        self.scales = torch.zeros(shape[:-1]) if kv_type == torch.int8 else None
        self._shared: dict[str, Tensor] = {}
        self._rotations: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    def begin(self, batch: BatchInputs) -> None:
        """Makes `batch` the step being computed, and does its block copies."""
        self.batch = batch
        self._rotations.clear()
        for source, destination in batch.copies.tolist():
            self.cache[:, :, destination] = self.cache[:, :, source]
            if self.scales is not None:
                self.scales[:, :, destination] = self.scales[:, :, source]

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> _Linear:
        """Stacks parts by rows; a missing bias beside a present one counts as zero."""
        weight = torch.cat([self._decoded(part) for part in parts]) if len(parts) > 1 else self._decoded(parts[0])
        if all(bias is None for bias in biases):
            return _Linear(weight, None)
        pieces = [
            torch.zeros(part.shape[0]) if bias is None else self.vector(bias)
            for part, bias in zip(parts, biases, strict=True)
        ]
        return _Linear(weight, torch.cat(pieces))

    def vector(self, tensor: RawTensor) -> Tensor:
        """A float32 vector."""
        return torch.from_numpy(dequantize(tensor))

    def table(self, tensor: RawTensor) -> Tensor:
        """A matrix to look rows up in; shared with `matrix` of the same tensor."""
        decoded = self._decoded(tensor)
        self._shared[tensor.name] = decoded
        return decoded

    def expert_matrix(self, experts: Sequence[Sequence[RawTensor]]) -> Tensor:
        """(num_experts, out_features, in_features)."""
        return torch.stack([torch.cat([self._decoded(part) for part in parts]) for parts in experts])

    def embed(self, table: Tensor) -> Tensor:
        """(M, hidden) rows of token_ids."""
        return table[_index(self.batch.token_ids)]

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        """X + table[positions]."""
        return x + table[_index(self.batch.positions)]

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: NormKind, reader: object = None
    ) -> Tensor:
        """RMSNorm or LayerNorm over the last axis."""
        if kind == "layer":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        scaled = _rms_normed(x, weight, eps)
        return scaled if bias is None else scaled + bias

    def linear(self, x: Tensor, weight: _Linear) -> Tensor:
        """X @ W.T + bias."""
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def linear_add(self, x: Tensor, weight: _Linear, residual: Tensor) -> Tensor:
        """Residual + X @ W.T + bias."""
        return residual + self.linear(x, weight)

    def experts(
        self, x: Tensor, router: _Linear, up: Tensor, down: Tensor, residual: Tensor | None, config: ExpertsConfig
    ) -> Tensor:
        """Residual + the weighted sum of each row's experts, expert by expert."""
        scores = self.linear(x, router).softmax(-1)
        # A stable sort: of two experts alike the first is chosen, on every backend.
        order = scores.argsort(dim=-1, descending=True, stable=True)[:, : config.num_chosen]
        chosen = torch.zeros_like(scores).scatter(1, order, scores.gather(1, order))
        if config.renormalizes:
            chosen /= chosen.sum(-1, keepdim=True)
        out = torch.zeros_like(x) if residual is None else residual.clone()
        for expert in sorted(set(order.flatten().tolist())):
            [rows] = (order == expert).any(-1).nonzero(as_tuple=True)
            inner = self.act(x[rows] @ up[expert].T, "swiglu")
            out[rows] += chosen[rows, expert, None] * (inner @ down[expert].T)
        return out

    def add_gated(self, x: Tensor, h: Tensor, gate: Tensor, residual: Tensor | None) -> Tensor:
        """Residual + sigmoid(h @ gate) * x."""
        gated = (h @ gate).sigmoid()[:, None] * x
        return gated if residual is None else residual + gated

    def rope_kv(
        self, qkv: Tensor, layer: int, num_heads: int, rope: RopeConfig | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Norms and rotates q and k, writes k and v to the batch's slots; returns q, (M, num_heads * head_dim)."""
        kv = self.kv
        heads = qkv.view(len(qkv), num_heads + 2 * kv.num_kv_heads, kv.head_dim)
        q, k, v = torch.split(heads, [num_heads, kv.num_kv_heads, kv.num_kv_heads], dim=1)
        if norms is not None:
            q, k = _rms_normed(q, norms.q, norms.eps), _rms_normed(k, norms.k, norms.eps)
        if rope is not None:
            cos, sin = self._rotation(rope)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self._write(0, layer, k)
        self._write(1, layer, v)
        return q.reshape(len(qkv), num_heads * kv.head_dim)

    def attention(self, q: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """Causal paged attention, sequence by sequence, (M, num_heads * head_dim)."""
        batch, kv = self.batch, self.kv
        out = torch.empty_like(q)
        for s in range(len(batch.seq_lens)):
            start, stop = int(batch.query_start[s]), int(batch.query_start[s + 1])
            length = int(batch.seq_lens[s])
            blocks = _index(batch.block_table[s, : -(-length // kv.block_size)])
            k, v = self._read(0, layer, blocks, length), self._read(1, layer, blocks, length)
            positions = _index(batch.positions[start:stop])
            rows = q[start:stop].view(stop - start, kv.num_kv_heads, -1, kv.head_dim)
            out[start:stop] = _attend(rows, k, v, positions, scale, window).reshape(stop - start, -1)
        return out

    def act(self, x: Tensor, kind: Activation, reader: object = None) -> Tensor:
        """Swiglu: silu of the first half times the second; gelu kinds elementwise."""
        if kind == "swiglu":
            gate, up = x.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def gather(self, x: Tensor) -> Tensor:
        """(R, width) rows `logits_rows`."""
        return x[_index(self.batch.logits_rows)]

    def logits(self, x: Tensor, weight: _Linear) -> Tensor:
        """(R, vocab) raw logits."""
        self.normed = x
        return self.linear(x, weight)

    def _write(self, part: int, layer: int, new: Tensor) -> None:
        """Keys (part 0) or values (1) of the batch's tokens, to their slots."""
        kv, slots = self.kv, _index(self.batch.slots)
        if self.scales is not None:
            largest = new.abs().amax(-1)
            self.scales[part, layer].view(-1, kv.num_kv_heads)[slots] = largest / 127.0
            new = (new * torch.where(largest > 0.0, 127.0 / largest, 0.0)[..., None]).round()
        self.cache[part, layer].view(-1, kv.num_kv_heads, kv.head_dim)[slots] = new.to(self.cache.dtype)

    def _read(self, part: int, layer: int, blocks: Tensor, length: int) -> Tensor:
        """The first `length` keys (part 0) or values (1) of these blocks, (length, num_kv_heads, head_dim)."""
        kv = self.kv
        stored = self.cache[part, layer, blocks].view(-1, kv.num_kv_heads, kv.head_dim)[:length].float()
        if self.scales is None:
            return stored
        return stored * self.scales[part, layer, blocks].view(-1, kv.num_kv_heads)[:length, :, None]

    def _decoded(self, tensor: RawTensor) -> Tensor:
        shared = self._shared.get(tensor.name)
        return torch.from_numpy(dequantize(tensor)) if shared is None else shared

    def _rotation(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        """Cos and sin of the batch's positions, (M, 1, rotary_dim / 2); the same in all layers of a step."""
        if rope not in self._rotations:
            # Doubles: at position 100,000 a float32 angle is off by more than the tolerance of the comparisons.
            frequencies = torch.tensor(inverse_frequencies(rope), dtype=torch.float64)
            angles = _index(self.batch.positions).double()[:, None] * frequencies
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
            self._rotations[rope] = cos.float()[:, None], sin.float()[:, None]
        return self._rotations[rope]


class RefRunner:
    """A model loaded into torch. Not thread-safe."""

    def __init__(
        self, checkpoint: Checkpoint, options: RunnerOptions, wrap: Callable[[Ops], Ops] = lambda ops: ops
    ) -> None:
        """Decodes the weights and allocates the cache; `wrap` puts something around the operations."""
        config = checkpoint.config
        self.config = config
        self.kv = KVConfig.of(config, options)
        self.weight_bytes = weight_bytes(checkpoint)
        self.kv_bytes = options.num_blocks * kv_block_bytes(config, options)
        self.max_wait_s = 0.0
        self._ops: RefOps | None = RefOps(self.kv, _KV_TYPES[options.kv_format])
        self._wrapped: Ops | None = wrap(self._ops)
        self._weights: DecoderWeights | None = load_weights(self._wrapped, checkpoint)

    @property
    def is_ready(self) -> bool:
        """Always: a runner is made with all its weights."""
        return True

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample."""
        output = sample(self.logits(batch), sampling)
        if not sampling.wants_hidden:
            return output
        assert self._ops is not None, "it has just computed"
        return replace(output, hidden=self._ops.normed.numpy())

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Copies and forward, (R, vocab)."""
        if self._ops is None or self._wrapped is None or self._weights is None:
            raise RuntimeError("the runner is closed")
        with torch.inference_mode():
            self._ops.begin(batch)
            result: FloatArray = forward(self._wrapped, self.config, self._weights).numpy()
        return result

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Empties KV blocks. Their memory stays: a tensor gives no part of itself back, and nobody serves with this.

        Raises:
            InternalError: the blocks lie outside the cache.
        """
        self.kv.check_range(first_block, num_blocks)
        if self._ops is None:
            raise InternalError("the runner is closed")
        self._ops.cache[:, :, first_block : first_block + num_blocks] = 0

    def close(self) -> None:
        """Gives back all memory. The runner is dead afterwards."""
        self._ops = self._wrapped = self._weights = None


def _index(ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))


def _rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation: element i turns with element i + rotary_dim / 2; what is beyond rotary_dim stays."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int | None) -> Tensor:
    """Softmax attention: q (T, kv_heads, group, d), k and v (L, kv_heads, d); returns (T, kv_heads, group, d)."""
    scores = torch.einsum("tngd,lnd->tngl", q, k) * scale
    distance = positions[:, None] - torch.arange(len(k))[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden[:, None, None, :], -math.inf)
    return torch.einsum("tngl,lnd->tngd", scores.softmax(-1), v)
