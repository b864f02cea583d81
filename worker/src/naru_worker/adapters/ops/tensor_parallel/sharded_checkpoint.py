"""A checkpoint that hands out one rank's slices: rows as views of the file, columns as copies of themselves alone."""

from __future__ import annotations

import math

import numpy as np

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.ops.tensor_parallel.sharding import InnerBlocks, Shard, shard_of
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.lazy_tensor import LazyTensor
from naru_worker.adapters.weights.tensor_format import BLOCKS, row_bytes

_QUERY, _KEY_VALUE = ("q", "q_bias"), ("k", "k_bias", "v", "v_bias")
_INNER = ("gate", "gate_bias", "up", "up_bias")
_ADDED_ONCE = ("o_bias", "down_bias")
"""Biases of outputs that add up over the ranks."""


class ShardedCheckpoint:
    """Implements `Checkpoint` over another one, which it closes."""

    def __init__(self, whole: Checkpoint, rank: int, size: int, *, is_sizes_only: bool = False) -> None:
        """Looks at how columns of MLPs and experts lie in the file. `is_sizes_only`: columns are zeros without memory.

        Raises:
            LoadError: the model cannot be split into so many parts.
        """
        self._whole = whole
        self._columns = _blank_columns if is_sizes_only else _columns
        self.shard: Shard = shard_of(whole.config, rank, size, _inner_blocks(whole))
        self.config = self.shard.config
        self.chat_template = whole.chat_template

    @property
    def revision(self) -> str:
        """Of the whole model."""
        return self._whole.revision

    def has(self, name: str) -> bool:
        """Whether this rank has the tensor or a part of it."""
        if name == "lm_head":
            return True
        if name.rpartition(".")[2] in _ADDED_ONCE and self.shard.rank > 0:
            return False
        return self._whole.has(name)

    def get(self, name: str) -> RawTensor:
        """This rank's part of a tensor.

        Raises:
            LoadError: there is no such tensor on this rank, or blocks that share a scale would have to be parted.
        """
        if not self.has(name):
            raise LoadError(f"rank {self.shard.rank} has no tensor {name!r}", param=name)
        if name == "lm_head":
            return self._head()
        tensor, part = self._whole.get(name), name.rpartition(".")[2]
        shard, width = self.shard, self.config.head_dim
        if part in _QUERY:
            return _rows(tensor, shard.heads, width)
        if part in _KEY_VALUE:
            return _rows(tensor, shard.kv_heads, width)
        if part == "o":
            return self._columns(tensor, shard.heads, width)
        inner = shard.expert_inner if ".experts." in name else shard.shared_inner if ".shared." in name else shard.inner
        if part in _INNER:
            return _rows(tensor, inner)
        return self._columns(tensor, inner, 1) if part == "down" else tensor

    def sizes(self) -> ShardedCheckpoint:
        """The same without the data of columns, which need not be read to know what they will take."""
        return ShardedCheckpoint(self._whole, self.shard.rank, self.shard.size, is_sizes_only=True)

    def close(self) -> None:
        """Closes the whole checkpoint."""
        self._whole.close()

    def _head(self) -> RawTensor:
        """Rows of the head, which may be the embedding; under the head's name, as it is no longer the same tensor."""
        source = self._whole.get("embed" if self._whole.config.tie_word_embeddings else "lm_head")
        rows = _rows(source, self.shard.vocab)
        if isinstance(rows, LazyTensor):
            return rows.renamed("lm_head")
        return RawTensor("lm_head", rows.format, rows.shape, rows.data)


def _inner_blocks(whole: Checkpoint) -> InnerBlocks:
    """Of all layers together."""
    config, plain, expert, shared = whole.config, [1], [1], [1]
    for i in range(config.num_layers):
        experts = config.experts_of(i)
        if experts is None:
            plain.append(_block_columns(whole, f"layers.{i}.down"))
            continue
        expert += [_block_columns(whole, f"layers.{i}.experts.{e}.down") for e in range(experts.num_experts)]
        if experts.shared_size:
            shared.append(_block_columns(whole, f"layers.{i}.shared.down"))
    return InnerBlocks(math.lcm(*plain), math.lcm(*expert), math.lcm(*shared))


def _block_columns(whole: Checkpoint, name: str) -> int:
    return BLOCKS[whole.get(name).format][0]


def _rows(tensor: RawTensor, part: range, unit: int = 1) -> RawTensor:
    """Rows [part.start, part.stop) * unit of a matrix, or elements of a vector: a view."""
    start, stop = part.start * unit, part.stop * unit
    if isinstance(tensor, LazyTensor):
        return tensor.cut(range(start, stop), range(tensor.shape[1]))
    stride = row_bytes(tensor.format, tensor.shape[-1]) if len(tensor.shape) == 2 else BLOCKS[tensor.format][1]
    data = tensor.data[start * stride : stop * stride]
    return RawTensor(tensor.name, tensor.format, (stop - start, *tensor.shape[1:]), data)


def _columns(tensor: RawTensor, part: range, unit: int) -> RawTensor:
    """Columns [part.start, part.stop) * unit of a matrix: a copy of these.

    Raises:
        LoadError: a block that shares a scale lies on both sides of a border.
    """
    width, blocks = _cut(tensor, part, unit)
    num_rows, num_columns = tensor.shape
    if isinstance(tensor, LazyTensor):
        return tensor.cut(range(num_rows), range(part.start * unit, part.stop * unit))
    rows = np.frombuffer(tensor.data, np.uint8).reshape(num_rows, row_bytes(tensor.format, num_columns))
    cut = np.ascontiguousarray(rows[:, blocks])
    return RawTensor(tensor.name, tensor.format, (num_rows, width), cut.reshape(-1).data.toreadonly())


def _blank_columns(tensor: RawTensor, part: range, unit: int) -> RawTensor:
    """As many as `_columns` gives; raises as it does."""
    if isinstance(tensor, LazyTensor):
        return _columns(tensor, part, unit)
    width, blocks = _cut(tensor, part, unit)
    data = np.broadcast_to(np.uint8(0), (tensor.shape[0] * (blocks.stop - blocks.start),)).data
    return RawTensor(tensor.name, tensor.format, (tensor.shape[0], width), data)


def _cut(tensor: RawTensor, part: range, unit: int) -> tuple[int, slice]:
    """Number of the columns [part.start, part.stop) * unit, and where in a row their bytes lie.

    Raises:
        LoadError: a block that shares a scale lies on both sides of a border.
    """
    start, stop = part.start * unit, part.stop * unit
    elements, size = BLOCKS[tensor.format]
    if start % elements or stop % elements:
        raise LoadError(
            f"tensor {tensor.name!r} is {tensor.format}, where {elements} columns share a scale: it cannot be cut at "
            f"columns {start} and {stop}; use fewer ranks, or a file with smaller blocks",
            param=tensor.name,
        )
    return stop - start, slice(start // elements * size, stop // elements * size)
