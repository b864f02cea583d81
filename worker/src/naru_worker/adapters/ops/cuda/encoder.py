"""Encoders on a GPU: torch's own operations, in float32, one text after the other.

Loaded by name like the CPU backend's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from naru_proto.errors import LoadError
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.ops.cuda.device import open_gpu
from naru_worker.adapters.ops.cuda.faults import told_apart
from naru_worker.adapters.ops.encoder_options import EncoderOptions
from naru_worker.adapters.ops.protocol import FloatArray
from naru_worker.adapters.ops.ref_encoder import RefEncoder, weight_bytes, workspace_bytes
from naru_worker.core.encoder_config import EncoderConfig

__all__ = ["load_encoder", "weight_bytes", "workspace_bytes"]


def load_encoder(
    config: EncoderConfig, tensors: Iterable[tuple[str, FloatArray]], options: EncoderOptions
) -> CudaEncoder:
    """Puts the weights on the GPU.

    Raises:
        LoadError: a tensor is broken, there is no GPU to use, or it has no room.
    """
    gpu = open_gpu()
    try:
        weights = {name: torch.from_numpy(values).to(gpu.torch_device) for name, values in tensors}
    except torch.OutOfMemoryError as exc:
        raise LoadError(
            f"{gpu.name} has no room for {weight_bytes(config)} bytes of weights; lower memory_budget_bytes, or load "
            "fewer models"
        ) from exc
    return CudaEncoder(config, weights, options)


class CudaEncoder(RefEncoder):
    """A loaded encoder. Not thread-safe."""

    def encode(self, inputs: Sequence[EncoderInput]) -> FloatArray:
        """(len(inputs), width), pooled, or scores.

        Raises:
            InternalError: the inputs break a rule of the runner.
            Unavailable: the GPU has no room for the activations.
            DeviceError: the device failed.
        """
        with told_apart("an encoder", f"a batch of {len(inputs)} texts"):
            return super().encode(inputs)
