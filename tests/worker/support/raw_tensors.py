"""Random tensors in every format of a checkpoint, byte for byte as a file holds them."""

from __future__ import annotations

import numpy as np

from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.tensor_format import BLOCKS, tensor_bytes

_SCALES: dict[TensorFormat, tuple[int, ...]] = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q6_k": (208,),
}
"""Byte offsets of the f16 numbers in a block; all other bytes may be anything."""


def random_tensor(tensor_format: TensorFormat, *shape: int, seed: int = 0, name: str = "w") -> RawTensor:
    """A tensor whose values are of about unit size."""
    rng = np.random.default_rng(seed)
    if tensor_format not in _SCALES:
        values = rng.standard_normal(shape).astype(np.float32)
        if tensor_format == "bf16":
            raw = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes()
        else:
            raw = values.astype(np.float16 if tensor_format == "f16" else np.float32).tobytes()
    else:
        size = BLOCKS[tensor_format][1]
        blocks = rng.integers(0, 256, (tensor_bytes(tensor_format, shape) // size, size)).astype(np.uint8)
        for offset in _SCALES[tensor_format]:
            scales = rng.uniform(-0.01, 0.01, len(blocks)).astype("<f2")
            blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
        raw = blocks.tobytes()
    return RawTensor(name, tensor_format, shape, memoryview(raw))
