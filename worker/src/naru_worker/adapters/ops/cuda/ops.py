"""The operation protocol on the GPU: every operation is one or two kernel launches on the step's tensors.

The decoder runs over it at each step, or once while a CUDA graph is captured: nothing here waits for the device, and
launches depend on shapes and on the numbers of `StepTensors` only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.device import GpuDevice
from naru_worker.adapters.ops.cuda.expert_weights import ExpertRows
from naru_worker.adapters.ops.cuda.experts import mix_experts
from naru_worker.adapters.ops.cuda.kernels.act import act
from naru_worker.adapters.ops.cuda.kernels.attention_decode import (
    attention_decode,
    decode_partials_shape,
    split_count,
    split_tokens,
)
from naru_worker.adapters.ops.cuda.kernels.attention_prefill import attention_prefill
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import Fp8Rows
from naru_worker.adapters.ops.cuda.kernels.gated_add import gated_add
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupRows
from naru_worker.adapters.ops.cuda.kernels.norm import norm
from naru_worker.adapters.ops.cuda.kernels.rope_kv import rope_kv
from naru_worker.adapters.ops.cuda.kv_views import LayerCache
from naru_worker.adapters.ops.cuda.linear import linear
from naru_worker.adapters.ops.cuda.step_tensors import StepTensors
from naru_worker.adapters.ops.cuda.table_rows import add_table_rows, table_rows
from naru_worker.adapters.ops.cuda.weights import DenseRows, LinearWeight
from naru_worker.adapters.ops.protocol import HeadNorms, KVConfig
from naru_worker.core.model_config import Activation, ExpertsConfig, NormKind, RopeConfig
from naru_worker.core.rope import inverse_frequencies


class CudaOps:
    """The graph half of the protocol. `begin` says what is being computed."""

    step: StepTensors
    normed: Tensor
    """What the head got: (R, hidden) of the step that was computed last."""

    def __init__(self, gpu: GpuDevice, kv: KVConfig, caches: list[LayerCache], max_positions: int) -> None:
        """Operations over these caches, for positions below `max_positions`."""
        self._gpu = gpu
        self._kv = kv
        self._caches = caches
        self._max_positions = max_positions
        self._rotations: dict[RopeConfig, Tensor] = {}
        self._is_gathered = False
        self._logits_out: Tensor | None = None

    def begin(self, step: StepTensors, logits_out: Tensor | None = None) -> None:
        """Makes `step` the one being computed. `logits_out`: (R, vocab), where its logits go; None: anywhere."""
        self.step = step
        self._logits_out = logits_out
        self._is_gathered = False

    def embed(self, table: LinearWeight) -> Tensor:
        """(M, hidden) rows of token_ids."""
        return table_rows(table, self.step.token_ids, self._gpu.activation_dtype)

    def add_positions(self, x: Tensor, table: LinearWeight) -> Tensor:
        """X + table[positions], in place."""
        return add_table_rows(x, table, self.step.positions)

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        kind: NormKind,
        reader: LinearWeight | None = None,
    ) -> Tensor | Fp8Rows:
        """RMSNorm or LayerNorm over the last axis; of 8 bits where its only reader would round it to them."""
        if reader is None or not reader.takes_fp8:
            return norm(x, weight, bias, eps, kind)
        rows = Fp8Rows.empty(len(x), x.shape[1], x.device)
        norm(x, weight, bias, eps, kind, out=rows.values, scales=rows.scales)
        return rows

    def linear(self, x: Tensor | Fp8Rows, weight: LinearWeight) -> Tensor:
        """X @ W.T + bias."""
        return self._linear(x, weight, None)

    def linear_add(self, x: Tensor | Fp8Rows, weight: LinearWeight, residual: Tensor) -> Tensor:
        """Residual + X @ W.T + bias, in place."""
        return self._linear(x, weight, residual)

    def experts(
        self,
        x: Tensor,
        router: LinearWeight,
        up: ExpertRows,
        down: ExpertRows,
        residual: Tensor | None,
        config: ExpertsConfig,
    ) -> Tensor:
        """Residual + the weighted sum of each row's experts, in place."""
        [chooser] = router.segments
        assert isinstance(chooser, DenseRows), "checkpoints refuse others"
        out = torch.empty_like(x) if residual is None else residual
        for rows, regime in self._kinds(len(x)):
            mix_experts(
                x[rows], chooser.values, up, down, config, regime=regime,
                residual=None if residual is None else residual[rows], out=out[rows], arch=self._gpu.arch,
            )  # fmt: skip
        return out

    def add_gated(self, x: Tensor, h: Tensor, gate: Tensor, residual: Tensor | None) -> Tensor:
        """Residual + sigmoid(h @ gate) * x, in place."""
        return gated_add(x, h, gate, residual=residual, out=residual)

    def rope_kv(
        self, qkv: Tensor, layer: int, num_heads: int, rope: RopeConfig | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Norms and rotates q and k, writes k and v to the step's slots; returns q, (M, num_heads, head_dim)."""
        cache = self._caches[layer]
        q = torch.empty((len(qkv), num_heads, self._kv.head_dim), dtype=qkv.dtype, device=qkv.device)
        rope_kv(
            qkv,
            None if rope is None else self._rotation(rope),
            self.step.positions,
            self.step.slots,
            q,
            cache.keys,
            cache.values,
            num_heads=num_heads,
            q_norm=None if norms is None else norms.q,
            k_norm=None if norms is None else norms.k,
            eps=0.0 if norms is None else norms.eps,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
        )
        return q

    def attention(self, q: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """Causal paged attention, (M, num_heads * head_dim)."""
        step, out = self.step, torch.empty_like(q)
        first = step.num_generated
        if first:
            self._attend_generated(q[:first], layer, scale, window, out[:first])
        if step.longest_prompt_chunk:
            cache = self._caches[layer]
            attention_prefill(
                q[first:],
                cache.keys,
                cache.values,
                step.prompt_table,
                step.prompt_start,
                step.prompt_lens,
                out[first:],
                scale=scale,
                window=window,
                max_query_len=step.longest_prompt_chunk,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
                arch=self._gpu.arch,
            )
        return out.flatten(1)

    def act(self, x: Tensor, kind: Activation, reader: LinearWeight | None = None) -> Tensor | Fp8Rows:
        """Swiglu: silu of the first half times the second; gelu kinds elementwise. Of 8 bits as `norm`'s is."""
        if reader is None or not reader.takes_fp8:
            return act(x, kind)
        rows = Fp8Rows.empty(len(x), reader.num_columns, x.device)
        act(x, kind, out=rows.values, scales=rows.scales)
        return rows

    def gather(self, x: Tensor) -> Tensor:
        """(R, width) rows `logits_rows`; what follows takes the way of generated rows."""
        self._is_gathered = True
        return x.index_select(0, self.step.logits_rows)

    def logits(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """(R, vocab) raw logits in the activations' type."""
        self.normed = x
        return linear(x, weight, regime="generated", out=self._logits_out, arch=self._gpu.arch)

    def _attend_generated(self, q: Tensor, layer: int, scale: float, window: int | None, out: Tensor) -> None:
        step, cache, head_dim = self.step, self._caches[layer], self._kv.head_dim
        split = split_tokens(head_dim, cache.keys.element_size())
        num_splits = split_count(step.longest_generated, split, window=window, most_rows=step.most_run_rows)
        partials = None
        if num_splits > 1:
            shape = decode_partials_shape(len(q), q.shape[1], head_dim, num_splits)
            partials = torch.empty(shape, dtype=torch.float32, device=q.device)
        attention_decode(
            q,
            cache.keys,
            cache.values,
            step.generated_table,
            step.run_lines,
            step.run_start,
            step.generated_lens,
            out,
            partials,
            scale=scale,
            window=window,
            num_splits=num_splits,
            most_rows=step.most_run_rows,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            arch=self._gpu.arch,
        )

    def _linear(self, x: Tensor | Fp8Rows, weight: LinearWeight, residual: Tensor | None) -> Tensor:
        """Each kind of rows by its own kernel: neither may depend on how many there are of the other."""
        out = residual
        if out is None:
            shape = (x.num_rows if isinstance(x, Fp8Rows) else len(x), weight.num_rows)
            out = torch.empty(shape, dtype=self._gpu.activation_dtype, device=self._gpu.torch_device)
        if isinstance(x, Fp8Rows) or not any(isinstance(segment, GroupRows) for segment in weight.segments):
            return linear(x, weight, regime="prompt", residual=residual, out=out, arch=self._gpu.arch)
        for rows, regime in self._kinds(len(x)):
            own = out[rows]
            added = None if residual is None else own  # `out` is the residual, if there is one
            linear(x[rows], weight, regime=regime, residual=added, out=own, arch=self._gpu.arch)
        return out

    def _kinds(self, num_rows: int) -> Iterator[tuple[slice, Regime]]:
        """Runs of rows of one kind, as many as there are."""
        first = num_rows if self._is_gathered else self.step.num_generated
        if first:
            yield slice(0, first), "generated"
        if num_rows > first:
            yield slice(first, num_rows), "prompt"

    def _rotation(self, rope: RopeConfig) -> Tensor:
        """Cosines and then sines of all positions, (max_positions, rotary_dim) float32."""
        if rope not in self._rotations:
            # Doubles: at position 100,000 a float32 angle is off by more than a bfloat16 result may be.
            frequencies = torch.tensor(inverse_frequencies(rope), dtype=torch.float64)
            angles = torch.arange(self._max_positions, dtype=torch.float64)[:, None] * frequencies
            table = torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor
            self._rotations[rope] = table.float().to(self._gpu.torch_device)
        return self._rotations[rope]
