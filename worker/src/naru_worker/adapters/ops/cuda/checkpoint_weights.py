"""The weight half of the operation protocol: a checkpoint's tensors, packed on the CPU and put on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cuda.device import GpuDevice
from naru_worker.adapters.ops.cuda.expert_weights import ExpertRows, expert_bytes, pack_experts
from naru_worker.adapters.ops.cuda.memory.errors import OutOfDeviceMemory
from naru_worker.adapters.ops.cuda.weights import (
    Capability,
    LinearWeight,
    num_fp8_rows,
    pack_matrix,
    pack_vector,
    packed_bytes,
    why_not_fp8,
)
from naru_worker.adapters.ops.protocol import RawTensor

_VECTOR_BYTES = 4


@dataclass(slots=True)
class Fp8Products:
    """How wide the results get of products of 8-bit floats, which are float32 at first; 0: there are none."""

    layer_width: int = 0
    """Of the tallest such matrix in the layers, which all tokens of a step meet."""
    head_width: int = 0
    """Of the head, which one token of each sequence meets."""

    def count(self, parts: Sequence[RawTensor], capability: Capability) -> None:
        """Takes a matrix in: one that is stacked of these."""
        width = num_fp8_rows(parts, capability)
        if parts[0].name.startswith("layers."):
            self.layer_width = max(self.layer_width, width)
        else:
            self.head_width = max(self.head_width, width)


class DeviceWeights:
    """Packs and places; one tensor that is both table and matrix is stored once. Not thread-safe."""

    def __init__(self, gpu: GpuDevice, place: Callable[[Tensor], Tensor] | None = None) -> None:
        """`place`: where tensors of the CPU go, such as a weight space; None: wherever torch has room on the GPU."""
        self._gpu = gpu
        self._put = place or (lambda tensor: tensor.to(gpu.torch_device))
        self._alone: dict[str, LinearWeight] = {}
        self.notes: Counter[str] = Counter()
        """Why matrices of 8-bit floats are not multiplied as such, and how many are not."""
        self.products = Fp8Products()

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> LinearWeight:
        """Stacks parts by rows; their formats may differ.

        Raises:
            LoadError: parts do not fit one another, a value does not fit its type, or the GPU has no room.
        """
        is_alone = len(parts) == 1 and biases[0] is None
        if is_alone and parts[0].name in self._alone:
            return self._alone[parts[0].name]
        weight = pack_matrix(parts, biases, self._gpu.activation_dtype, self._gpu.capability).placed(self._place)
        self.notes.update(filter(None, (why_not_fp8(part, self._gpu.capability) for part in parts)))
        self.products.count(parts, self._gpu.capability)
        if is_alone:
            self._alone[parts[0].name] = weight
        return weight

    def vector(self, tensor: RawTensor) -> Tensor:
        """A float32 vector.

        Raises:
            LoadError: it is no float vector, its data is short, or the GPU has no room.
        """
        return self._place(pack_vector(tensor))

    def table(self, tensor: RawTensor) -> LinearWeight:
        """A matrix whose rows are looked up."""
        return self.matrix([tensor], [None])

    def expert_matrix(self, experts: Sequence[Sequence[RawTensor]]) -> ExpertRows:
        """Stacks each expert's parts by rows.

        Raises:
            LoadError: parts do not fit one another, a value does not fit its type, or the GPU has no room.
        """
        return pack_experts(experts, self._gpu.activation_dtype).placed(self._place)

    def _place(self, tensor: Tensor) -> Tensor:
        try:
            return self._put(tensor)
        except (torch.OutOfMemoryError, OutOfDeviceMemory) as exc:
            raise LoadError(
                f"{self._gpu.name} has no room for {tensor.nbytes} more bytes of weights; lower memory_budget_bytes, "
                "or load fewer models"
            ) from exc


class WeightSizer:
    """Adds up what `DeviceWeights` will take; reads no data."""

    def __init__(self, dtype: torch.dtype, capability: Capability) -> None:
        """`dtype`: of the activations; `capability`: of the GPU."""
        self.num_bytes = 0
        self.products = Fp8Products()
        self._dtype = dtype
        self._capability = capability
        self._alone: set[str] = set()

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> None:
        """Counts a matrix; one of the same single tensor is counted once.

        Raises:
            LoadError: parts do not fit one another.
        """
        if len(parts) == 1 and biases[0] is None:
            if parts[0].name in self._alone:
                return
            self._alone.add(parts[0].name)
        self.num_bytes += packed_bytes(parts, biases, self._dtype, self._capability)
        self.products.count(parts, self._capability)

    def vector(self, tensor: RawTensor) -> None:
        """Counts a vector."""
        self.num_bytes += _VECTOR_BYTES * tensor.shape[0]

    def table(self, tensor: RawTensor) -> None:
        """Counts a table, which shares the storage of a matrix."""
        self.matrix([tensor], [None])

    def expert_matrix(self, experts: Sequence[Sequence[RawTensor]]) -> None:
        """Counts what all experts have.

        Raises:
            LoadError: parts do not fit one another.
        """
        self.num_bytes += expert_bytes(experts, self._dtype)
