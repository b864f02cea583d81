"""The operation protocol of one rank: a backend's own operations, and the exchanges between them.

For backends that compute at once or record CUDA graphs: handles are torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from naru_worker.adapters.ops.protocol import HeadNorms, Ops, RawTensor
from naru_worker.adapters.ops.tensor_parallel.collectives import Collectives
from naru_worker.core.model_config import Activation, ExpertsConfig, NormKind, RopeConfig


class ParallelOps:
    """Implements `Ops` over another one that has one rank's weights."""

    def __init__(self, inner: Ops, collectives: Collectives, vocab_size: int) -> None:
        """`vocab_size`: of the whole head."""
        self._inner = inner
        self._collectives = collectives
        self._vocab_size = vocab_size

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> Any:
        """As the backend has it; the parts are cut already."""
        return self._inner.matrix(parts, biases)

    def vector(self, tensor: RawTensor) -> Any:
        """As the backend has it."""
        return self._inner.vector(tensor)

    def table(self, tensor: RawTensor) -> Any:
        """As the backend has it."""
        return self._inner.table(tensor)

    def expert_matrix(self, experts: Sequence[Sequence[RawTensor]]) -> Any:
        """As the backend has it; every rank has a part of each expert."""
        return self._inner.expert_matrix(experts)

    def embed(self, table: Any) -> Any:
        """Of the whole table, the same on all ranks."""
        return self._inner.embed(table)

    def add_positions(self, x: Any, table: Any) -> Any:
        """The same on all ranks."""
        return self._inner.add_positions(x, table)

    def norm(self, x: Any, weight: Any, bias: Any | None, eps: float, kind: NormKind, reader: Any | None = None) -> Any:
        """The same on all ranks."""
        return self._inner.norm(x, weight, bias, eps, kind, reader)

    def linear(self, x: Any, weight: Any) -> Any:
        """The rank's columns of the output."""
        return self._inner.linear(x, weight)

    def linear_add(self, x: Any, weight: Any, residual: Any) -> Any:
        """The whole output: what the ranks have adds up, and the residual comes in once, behind it."""
        return self._collectives.add(self._inner.linear(x, weight), residual)

    def experts(self, x: Any, router: Any, up: Any, down: Any, residual: Any | None, config: ExpertsConfig) -> Any:
        """The whole output: all ranks choose the same experts, and what they have of them adds up."""
        assert residual is not None, "the decoder adds to one"
        return self._collectives.add(self._inner.experts(x, router, up, down, None, config), residual)

    def add_gated(self, x: Any, h: Any, gate: Any, residual: Any | None) -> Any:
        """The whole output, of a part of x on each rank."""
        assert residual is not None, "the decoder adds to one"
        return self._collectives.add(self._inner.add_gated(x, h, gate, None), residual)

    def rope_kv(
        self, qkv: Any, layer: int, num_heads: int, rope: RopeConfig | None, norms: HeadNorms | None = None
    ) -> Any:
        """Of the rank's heads."""
        return self._inner.rope_kv(qkv, layer, num_heads, rope, norms)

    def attention(self, q: Any, layer: int, scale: float, window: int | None) -> Any:
        """Of the rank's heads."""
        return self._inner.attention(q, layer, scale, window)

    def act(self, x: Any, kind: Activation, reader: Any | None = None) -> Any:
        """Of the rank's columns."""
        return self._inner.act(x, kind, reader)

    def gather(self, x: Any) -> Any:
        """Rows of the rank's columns, or of the residual."""
        return self._inner.gather(x)

    def logits(self, x: Any, weight: Any) -> Any:
        """(R, vocab) on rank 0; elsewhere the rank's own columns, for nobody."""
        own = self._inner.logits(x, weight)
        whole = self._collectives.gather_columns(own, self._vocab_size)
        return own if whole is None else whole
