"""Where every matrix and vector of a checkpoint goes in an image, decided before a byte is written.

Called by the packing process. The decoder's own loading function is run against a recorder, so that order and stacking
stand in one place. Reads no weights: sizes follow from formats and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naru_worker.adapters.images.header import ALIGN_BYTES, BIAS_PADDING, PAGE_BYTES, round_up
from naru_worker.adapters.images.image_index import IndexedMatrix, SegmentBytes, VectorPlace
from naru_worker.adapters.models.decoder import load_weights
from naru_worker.adapters.ops.cpu_pack import FORMAT_NUMBERS, check_parts, check_served
from naru_worker.adapters.ops.cpu_transcode import native_tensor
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.ops.weights_image import MatrixPlace, SegmentPlace
from naru_worker.adapters.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Places of all weights, in the order of the file."""

    vectors: dict[str, VectorPlace]
    matrices: tuple[IndexedMatrix, ...]
    stage_ends: tuple[int, ...]
    """As in `ImageIndex`."""

    @property
    def weights_end(self) -> int:
        """Whole pages."""
        return self.stage_ends[-1]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A matrix without a place. Formats, rows and names are kept, tensors are not: some are turned copies."""

    stage: int
    columns: int
    parts: tuple[tuple[str, int, int], ...]
    """(name, format, rows)."""
    biases: tuple[str, ...]


class WeightRecorder:
    """The weight half of the operation protocol: notes what the decoder asks for."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.stacks: dict[tuple[str, ...], _Stack] = {}
        self.vectors: dict[str, int] = {}

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> None:
        """Notes a stack; the head of a model with tied embeddings is the table noted before."""
        columns = check_parts(parts)
        names = tuple(part.name for part in parts)
        if names not in self.stacks:
            self.stacks[names] = _Stack(
                stage=self._stage(names[0]),
                columns=columns,
                parts=tuple((part.name, FORMAT_NUMBERS[native_tensor(part).format], part.shape[0]) for part in parts),
                biases=tuple(bias.name for bias in biases if bias is not None),
            )

    def vector(self, tensor: RawTensor) -> None:
        """Notes a vector."""
        self.vectors[tensor.name] = tensor.shape[0]

    def table(self, tensor: RawTensor) -> None:
        """A table is a matrix."""
        self.matrix([tensor], [None])

    def _stage(self, name: str) -> int:
        if name in ("embed", "pos_embed"):
            return 0
        kind, _, rest = name.partition(".")
        return int(rest.partition(".")[0]) + 1 if kind == "layers" else self._num_layers + 1


def plan_weights(checkpoint: Checkpoint, segment_bytes: SegmentBytes) -> WeightPlan:
    """The plan.

    Raises:
        LoadError: a tensor is missing or does not fit, or the model is none that images are made of.
    """
    check_served(checkpoint.config)
    num_layers = checkpoint.config.num_layers
    recorder = WeightRecorder(num_layers)
    load_weights(recorder, checkpoint)  # type: ignore[arg-type]  # only the weight half of the protocol is called
    position = PAGE_BYTES
    vectors: dict[str, VectorPlace] = {}
    for name, length in recorder.vectors.items():
        vectors[name] = VectorPlace(position, length)
        position = round_up(position + length * 4, ALIGN_BYTES)
    matrices: list[IndexedMatrix] = []
    stage_ends: list[int] = []
    for stage in range(num_layers + 2):
        position = round_up(position, PAGE_BYTES)
        for stack in recorder.stacks.values():
            if stack.stage == stage:
                matrix, position = _place(stack, position, segment_bytes)
                matrices.append(matrix)
        stage_ends.append(position)
    stage_ends[-1] = round_up(position, PAGE_BYTES)
    return WeightPlan(vectors, tuple(matrices), tuple(stage_ends))


def _place(stack: _Stack, position: int, segment_bytes: SegmentBytes) -> tuple[IndexedMatrix, int]:
    """Segments one after another, then the bias; returns where the next one may begin."""
    segments: list[SegmentPlace] = []
    for _, number, rows in stack.parts:
        num_bytes = segment_bytes(number, rows, stack.columns)
        segments.append(SegmentPlace(number, rows, position, num_bytes))
        position = round_up(position + num_bytes, ALIGN_BYTES)
    bias_offset = -1
    if stack.biases:
        bias_offset = position
        num_rows = sum(rows for _, _, rows in stack.parts)
        position = round_up(position + (num_rows + BIAS_PADDING) * 4, ALIGN_BYTES)
    names = tuple(name for name, _, _ in stack.parts)
    return IndexedMatrix(names, stack.biases, MatrixPlace(stack.columns, tuple(segments), bias_offset)), position
