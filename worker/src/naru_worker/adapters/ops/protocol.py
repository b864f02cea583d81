"""The operation protocol: about a dozen fused operations that every backend offers.

`adapters/models/decoder.py` is written once against it. A backend either computes at once (`ref`) or records
instructions that a later `run` replays (`cpu`: the tape, the CPU's CUDA graph). Tensors are opaque handles.

All activations are (num_tokens, width), float32 unless a backend says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from naru_proto.errors import InternalError
from naru_worker.core.model_config import Activation, ExpertsConfig, ModelConfig, NormKind, RopeConfig

FileFormat = Literal["f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]
"""How a tensor lies in its file. The q* ones are GGUF's block formats, byte for byte."""
TensorFormat = Literal[
    FileFormat, "q4_s64", "q4_s128", "q4_g64", "q4_g128", "e4m3_row", "e4m3_b32", "e4m3_b128"
]  # fmt: skip
"""How a tensor lies in memory. What safetensors hold in other quantizers' layouts is put into blocks along the columns:

q4_s64, q4_s128: q4_0 with 64 or 128 columns a block (an f16 scale, and nibbles, of which 8 stands for 0)
q4_g64, q4_g128: q4_1 with so many (f16 scale, f16 minimum, nibbles)
e4m3_b32, e4m3_b128: an f32 scale and 8-bit floats. e4m3_row: as e4m3_b32, with the same scale in all blocks of a row
"""

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as read from a checkpoint: its numbers are not converted, usually it is a view of the mapped file."""

    name: str
    format: TensorFormat
    shape: tuple[int, ...]
    """(rows, columns) = (out_features, in_features) for matrices; quantization blocks run along columns."""
    data: memoryview
    """Raw little-endian bytes, C-contiguous, read-only; valid while the checkpoint is open."""

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return self.data.nbytes


KVFormat = Literal["int8", "f16", "f32"]


@dataclass(frozen=True, slots=True)
class KVConfig:
    """Geometry of one model's paged KV cache. Block 0 is the null block: never handed out, may hold anything."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int

    @staticmethod
    def of(config: ModelConfig, options: RunnerOptions) -> KVConfig:
        """The cache of a model's runner."""
        heads = (config.num_layers, config.num_kv_heads, config.head_dim)
        return KVConfig(*heads, options.block_size, options.num_blocks)

    def check_range(self, first_block: int, num_blocks: int) -> None:
        """Refuses blocks that are not there.

        Raises:
            InternalError: they lie outside the cache.
        """
        if not 0 <= first_block <= first_block + num_blocks <= self.num_blocks:
            raise InternalError(
                f"blocks [{first_block}, {first_block + num_blocks}) lie outside the {self.num_blocks} of the cache"
            )


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Limits a runner is built for; buffers are made once for them.

    Every backend module offers ``load_runner(checkpoint, options) -> Runner``,
    ``weight_bytes(checkpoint) -> int`` (bytes of weights as they will lie in memory, known before loading) and
    ``kv_block_bytes(config, options) -> int`` (bytes of one KV block over all layers).
    """

    block_size: int
    num_blocks: int
    """Null block included."""
    max_num_tokens: int
    """Most tokens (M) of one step."""
    max_num_seqs: int
    """Most sequences (S) of one step."""
    max_model_len: int
    num_threads: int = 1
    kv_format: KVFormat = "f16"
    """Elements of the KV cache; int8: signed bytes with a scale for each token and kv head of keys and of values."""


@dataclass(frozen=True, slots=True)
class TableLines:
    """What a backend that keeps block tables in its own memory has to know to take over only what is new in a step's.

    A sequence keeps its line while it runs, wherever it stands in the batch. Arrays may change with the next step.
    """

    owner: object
    """Whose lines and stamps these are: those of another say nothing about them."""
    lines: Int32Array  # (S,) below max_num_seqs, none twice
    stamps: npt.NDArray[np.int64]  # (S,) at least 1; while a line's is the same, so is its row of the table


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One forward pass over M tokens of S sequences; sequences own consecutive runs of tokens.

    slots[i] = block * block_size + offset: where token i's key and value go. seq_lens counts tokens after this step,
    so a token at position p of sequence s attends to [max(0, p - window + 1), p], read through block_table[s].
    """

    token_ids: Int32Array  # (M,) below 0, to a `LaunchingRunner` alone: what row -1 - id of the step before draws
    positions: Int32Array  # (M,)
    slots: Int32Array  # (M,)
    query_start: Int32Array  # (S + 1,) first token of each sequence; last is M
    seq_lens: Int32Array  # (S,)
    block_table: Int32Array  # (S, max_blocks) padded with 0
    logits_rows: Int32Array  # (R,) token indices whose logits are computed, ascending
    copies: Int32Array  # (C, 2) block copies (source, destination) done before anything else
    num_generated_tokens: int = 0
    """The first so many of the M tokens were generated, the rest belong to prompts; a sequence has one kind only.

    A backend may compute the two kinds in different ways (many rows or few), but a token's result must depend on its
    kind and its sequence alone: neither batch mates, nor chunks, nor a cached prefix of prompt tokens may change an
    answer.
    """
    table_lines: TableLines | None = None
    """None: nobody keeps count of what changes in `block_table`."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows may draw: bits that another thread writes while the forward pass runs.

    A backend looks at them when `gate` is 1, and waits for that. When it has waited for `wait_s` it sets -1, and gives
    up all rows that come to it: their token is -1. The writer may open the gate even then, for rows that come later.
    """

    rows: Int32Array  # (R,) which mask; -1: none
    words: npt.NDArray[np.uint32]  # (masks, W) bit i % 32 of word i // 32: token i may be drawn; 32 W >= vocab_limit
    gate: Int32Array  # (1,) 0: closed, 1: open, -1: given up
    wait_s: float


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample the R logits rows. Row i draws with a counter-based generator keyed by (seed[i], counter[i]).

    Order of work: see `naru_worker.core.sampling.SamplingParams`. Rows whose `target[i] >= 0` do not sample: they score
    the given token (prompt logprobs). Ids at or above `vocab_limit` are never drawn nor reported.
    A batch that is given again, as the same object, differs in `counter` alone, and in what its masks allow.
    Tokens for penalties come flattened: row i's are penalty_ids[penalty_start[i]:penalty_start[i+1]] with the number of
    occurrences in the output (penalty_output_counts; 0 means: in the prompt only).
    """

    temperature: FloatArray  # (R,)
    top_k: Int32Array  # (R,) 0: all
    top_p: FloatArray  # (R,)
    min_p: FloatArray  # (R,)
    presence_penalty: FloatArray  # (R,)
    frequency_penalty: FloatArray  # (R,)
    repetition_penalty: FloatArray  # (R,)
    seed: npt.NDArray[np.uint64]  # (R,)
    counter: npt.NDArray[np.uint64]  # (R,) choice index << 32 | output position
    target: Int32Array  # (R,) -1: sample
    num_logprobs: Int32Array  # (R,) -1: none; k: chosen and k best
    bias_start: Int32Array  # (R + 1,)
    bias_ids: Int32Array
    bias_values: FloatArray
    penalty_start: Int32Array  # (R + 1,)
    penalty_ids: Int32Array
    penalty_output_counts: Int32Array
    banned_start: Int32Array  # (R + 1,) ids that may not be drawn (EOS before min_tokens)
    banned_ids: Int32Array
    vocab_limit: int
    max_logprobs: int
    """max(num_logprobs), at least 0: the width K of the outputs."""
    wants_hidden: bool = False
    """Whether the rows' hidden states are to be given, too."""
    masks: TokenMasks | None = None
    """What is not in a row's mask is impossible, before all else. Where a ban leaves nothing of it, the mask wins."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Result of sampling R rows. Logprobs are filled where asked; elsewhere undefined. Valid until the next run."""

    token_ids: Int32Array  # (R,) drawn, or the target
    logprobs: FloatArray  # (R,) of token_ids, raw distribution, >= -9999
    ranks: Int32Array  # (R,) 1 is best
    top_ids: Int32Array  # (R, K) best first, ties by lower id
    top_logprobs: FloatArray  # (R, K)
    hidden: FloatArray | None = None  # (R, hidden size) after the final norm, where it was asked for


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms that each head's query and key pass before they turn."""

    q: Any
    """(head_dim,), a vector of the backend."""
    k: Any
    eps: float


@dataclass(frozen=True, slots=True)
class RunnerBytes:
    """What a runner will take beside its KV cache, known before there is one."""

    weight_bytes: int
    """Of the weights as they will lie in memory."""
    workspace_bytes: int
    """Of the activations of a step; all models of a process share one workspace."""
    device_bytes: int = 0
    """What it has beside these, and keeps while its weights wait in host memory."""


class Ops(Protocol):
    """One model's operations on one backend: weights in, graph built once by the decoder, then `run` per step."""

    # --- weights -------------------------------------------------------------------------------------------------
    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> Any:
        """Stacks parts by rows into one linear weight; formats may differ between parts. Copies what it needs."""

    def vector(self, tensor: RawTensor) -> Any:
        """A float32 vector (norm weight or bias)."""

    def table(self, tensor: RawTensor) -> Any:
        """A matrix whose rows are looked up (embedding); may share storage with `matrix` of the same tensor."""

    def expert_matrix(self, experts: Sequence[Sequence[RawTensor]]) -> Any:
        """Each expert's parts stacked by rows: one linear weight an expert, all of one shape. Copies what it needs."""

    # --- graph: called once (record) or each step (ref) by the decoder ----------------------------------------------
    def embed(self, table: Any) -> Any:
        """(M, hidden) rows of token_ids."""

    def add_positions(self, x: Any, table: Any) -> Any:
        """X + table[positions] (learned positions)."""

    def norm(self, x: Any, weight: Any, bias: Any | None, eps: float, kind: NormKind, reader: Any | None = None) -> Any:
        """RMSNorm or LayerNorm over the last axis.

        `reader`: the matrix of the one `linear` or `linear_add` that reads the result, which may then be whatever those
        take with it; None: others read it, too.
        """

    def linear(self, x: Any, weight: Any) -> Any:
        """X @ W.T + bias."""

    def linear_add(self, x: Any, weight: Any, residual: Any) -> Any:
        """Residual + X @ W.T + bias; may overwrite residual."""

    def experts(self, x: Any, router: Any, up: Any, down: Any, residual: Any | None, config: ExpertsConfig) -> Any:
        """Residual (None: 0) + the sum of each row's experts, down(silu(gate(x)) * up(x)), each times its weight.

        The softmax of x @ router.T over all experts, in float32, says both: the `num_chosen` greatest are the row's
        experts, of two alike the first; what it is for each is its weight, over their sum if it `renormalizes`.

        `router` is a matrix; `up` (gate over up) and `down` are expert matrices. May overwrite residual.
        """

    def add_gated(self, x: Any, h: Any, gate: Any, residual: Any | None) -> Any:
        """Residual (None: 0) + sigmoid(h @ gate) * x, with a vector for `gate`; may overwrite residual."""

    def rope_kv(
        self, qkv: Any, layer: int, num_heads: int, rope: RopeConfig | None, norms: HeadNorms | None = None
    ) -> Any:
        """Splits (M, (num_heads + 2 num_kv_heads) head_dim) into q, k, v; norms and then rotates q and k; writes k and
        v to `slots`.

        Returns q, (M, num_heads * head_dim).
        """

    def attention(self, q: Any, layer: int, scale: float, window: int | None) -> Any:
        """Causal paged attention, (M, num_heads * head_dim)."""

    def act(self, x: Any, kind: Activation, reader: Any | None = None) -> Any:
        """Swiglu: silu(x[:, :n/2]) * x[:, n/2:]; gelu kinds: elementwise. `reader`: see `norm`."""

    def gather(self, x: Any) -> Any:
        """(R, width) rows `logits_rows`."""

    def logits(self, x: Any, weight: Any) -> Any:
        """(R, vocab) raw logits; marks the output of the graph."""


class DeviceFault(InternalError):
    """The device has failed, and with it whatever this process computes: the process must end, for others to take over.

    No request's fault, so none is ended with it: routers go on with them elsewhere.
    """


class WeightsPending(Exception):
    """A step needs weights that are still on their way; nothing was drawn: run the same step again, soon."""


class Runner(Protocol):
    """A loaded model on a device. Not thread-safe: one engine thread calls it."""

    kv: KVConfig
    weight_bytes: int
    """Bytes of weights in memory."""
    kv_bytes: int
    """Bytes of the KV cache."""
    max_wait_s: float
    """A step waits so long for weights that are still on their way; nobody else's step can run meanwhile."""

    @property
    def is_ready(self) -> bool:
        """Whether all weights are there (or never will be): steps neither wait nor begin in vain."""

    def run(self, batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        """One step: copies, forward, sample.

        Raises:
            WeightsPending: the model is still being loaded; copies may have been made, which are safe to make again.
        """

    def logits(self, batch: BatchInputs) -> FloatArray:
        """Forward only, (R, vocab): for tests, scoring and comparison."""

    def release_blocks(self, first_block: int, num_blocks: int) -> None:
        """Gives the memory of KV blocks back to the machine. Their content is void; writing takes memory again."""

    def close(self) -> None:
        """Gives back all memory. The runner is dead afterwards."""


class LaunchingRunner(Runner, Protocol):
    """A runner that can be given the next step before the results of this one are there."""

    def launch(self, batch: BatchInputs, sampling: SamplingBatch) -> Any:
        """Begins a step, which runs after all that were begun before, and gives a handle; raises as `run`.

        The arrays may change after the call. At most two handles are not fetched. Where tokens are below 0, each row
        draws behind one token that `sampling` does not count for penalties yet: it counts.
        """

    def fetch(self, step: Any) -> SampleOutput:
        """What a launched step drew, in the order of launches; waits for that step alone."""
