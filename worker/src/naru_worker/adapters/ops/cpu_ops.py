"""The operation protocol in record mode: the decoder runs once and leaves a tape that native code replays.

Called when a model is loaded, or measured before. A handle stands for a buffer; which forms of it are written (floats,
quantized) follows from who reads it. Does not compute anything.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_pack import PackedMatrix
from naru_worker.adapters.ops.native_lib import BufferSpec, Instruction
from naru_worker.adapters.ops.protocol import HeadNorms
from naru_worker.core.model_config import Activation, NormKind, RopeConfig

# Numbers of `OpCode`, `NormKind` and `ActKind` in native/src.
_EMBED, _ADD_POSITIONS, _NORM, _LINEAR, _LINEAR_ADD, _ROPE_KV, _ATTENTION, _ACT, _GATHER, _LOGITS = range(10)
_NORMS: dict[NormKind, int] = {"rms": 0, "layer": 1}
_ACTS: dict[Activation, int] = {"swiglu": 0, "gelu_tanh": 1, "gelu": 2}


@dataclass(slots=True)
class Buffer:
    """Activations between operations: (rows of a step, width), or gathered rows after `gather`."""

    kind: str
    width: int
    is_gathered: bool
    index: int
    is_fed: bool = False
    """Read by a linear layer."""
    wants_floats: bool = False
    wants_quants: bool = False


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries inside a buffer of stacked q, k, v rows."""

    buffer: Buffer
    num_heads: int


class TapeRecorder:
    """Records one decoder; the graph half of the protocol only."""

    def __init__(self, head_dim: int, num_kv_heads: int) -> None:
        self._head_dim = head_dim
        self._num_kv_heads = num_kv_heads
        self._buffers: list[Buffer] = []
        self.tape: list[Instruction] = []

    def embed(self, table: PackedMatrix) -> Buffer:
        """(M, hidden) rows of token_ids."""
        x = self._buffer("x", table.num_columns)
        x.wants_floats = True
        self._record(_EMBED, dst=x, weight=table.id)
        return x

    def add_positions(self, x: Buffer, table: PackedMatrix) -> Buffer:
        """In place."""
        self._record(_ADD_POSITIONS, dst=x, src=x, weight=table.id)
        return x

    def norm(
        self, x: Buffer, weight: int, bias: int | None, eps: float, kind: NormKind, reader: object = None
    ) -> Buffer:
        """Rows with their norm taken out."""
        x.wants_floats = True
        out = self._buffer("norm", x.width, x)
        self._record(
            _NORM, dst=out, src=x, weight=weight, bias=-1 if bias is None else bias, value=eps, kind=_NORMS[kind]
        )
        return out

    def linear(self, x: Buffer, weight: PackedMatrix) -> Buffer:
        """X @ W.T + bias."""
        self._feed(x, weight)
        out = self._buffer("linear", weight.num_rows, x)
        out.wants_floats = True
        self._record(_LINEAR, dst=out, src=x, weight=weight.id)
        return out

    def linear_add(self, x: Buffer, weight: PackedMatrix, residual: Buffer) -> Buffer:
        """Adds to the residual in place."""
        self._feed(x, weight)
        if residual.width != weight.num_rows:
            raise LoadError(f"a residual of {residual.width} columns meets a weight of {weight.num_rows} rows")
        self._record(_LINEAR_ADD, dst=residual, src=x, weight=weight.id)
        return residual

    def rope_kv(
        self, qkv: Buffer, layer: int, num_heads: int, rope: RopeConfig | None, norms: HeadNorms | None = None
    ) -> Queries:
        """Norms and rotates in place and writes keys and values; the queries stay where they are."""
        needed = (num_heads + 2 * self._num_kv_heads) * self._head_dim
        if qkv.width != needed:
            raise LoadError(f"layer {layer}: q, k and v have {qkv.width} rows together; {needed} are needed")
        if norms is None:
            self._record(_ROPE_KV, src=qkv, layer=layer, kind=num_heads)
        else:
            self._record(_ROPE_KV, src=qkv, layer=layer, kind=num_heads, weight=norms.q, bias=norms.k, value=norms.eps)
        return Queries(qkv, num_heads)

    def attention(self, q: Queries, layer: int, scale: float, window: int | None) -> Buffer:
        """(M, num_heads * head_dim)."""
        out = self._buffer("attention", q.num_heads * self._head_dim, q.buffer)
        out.wants_floats = True
        self._record(_ATTENTION, dst=out, src=q.buffer, layer=layer, value=scale, window=window or 0)
        return out

    def act(self, x: Buffer, kind: Activation, reader: object = None) -> Buffer:
        """Half as wide as its input for swiglu."""
        out = self._buffer("act", x.width // 2 if kind == "swiglu" else x.width, x)
        self._record(_ACT, dst=out, src=x, kind=_ACTS[kind])
        return out

    def gather(self, x: Buffer) -> Buffer:
        """The rows whose logits are wanted; what follows works on them."""
        x.wants_floats = True
        out = Buffer("gather", x.width, True, len(self._buffers), wants_floats=True)
        self._buffers.append(out)
        self._record(_GATHER, dst=out, src=x)
        return out

    def logits(self, x: Buffer, weight: PackedMatrix) -> Buffer:
        """Ends the tape; what goes in is kept in floats, for who asks for hidden states."""
        self._feed(x, weight)
        x.wants_floats = True
        self._record(_LOGITS, src=x, weight=weight.id)
        return x

    def buffer_specs(self) -> ctypes.Array[BufferSpec]:
        """The buffers, for native code."""
        return (BufferSpec * len(self._buffers))(
            *(BufferSpec(b.width, b.wants_floats, b.wants_quants, b.is_gathered, b.is_fed) for b in self._buffers)
        )

    def finish(self, library: ctypes.CDLL, model: int) -> None:
        """Hands buffers and tape over to a native model.

        Raises:
            LoadError: the activations do not fit the workspace.
        """
        buffers = self.buffer_specs()
        tape = (Instruction * len(self.tape))(*self.tape)
        if library.naru_finish(model, buffers, len(buffers), tape, len(self.tape)) != 0:
            raise LoadError("the activations do not fit the workspace; lower max_num_tokens or max_model_len")

    def _buffer(self, kind: str, width: int, source: Buffer | None = None) -> Buffer:
        """A buffer of that kind and width: the one of the layer before, unless it is being read."""
        is_gathered = source is not None and source.is_gathered
        for buffer in self._buffers:
            if (buffer.kind, buffer.width, buffer.is_gathered) == (kind, width, is_gathered) and buffer is not source:
                return buffer
        self._buffers.append(Buffer(kind, width, is_gathered, len(self._buffers)))
        return self._buffers[-1]

    def _feed(self, x: Buffer, weight: PackedMatrix) -> None:
        if x.width != weight.num_columns:
            raise LoadError(f"activations of {x.width} columns meet a weight of {weight.num_columns} columns")
        x.is_fed = True
        x.wants_floats |= weight.wants_floats
        x.wants_quants |= weight.wants_quants

    def _record(
        self,
        op: int,
        *,
        dst: Buffer | None = None,
        src: Buffer | None = None,
        weight: int = -1,
        bias: int = -1,
        layer: int = 0,
        kind: int = 0,
        window: int = 0,
        value: float = 0.0,
    ) -> None:
        tail = op != _GATHER and any(buffer is not None and buffer.is_gathered for buffer in (dst, src))
        self.tape.append(
            Instruction(
                op,
                -1 if dst is None else dst.index,
                -1 if src is None else src.index,
                weight,
                bias,
                layer,
                kind,
                window,
                value,
                tail,
            )
        )
