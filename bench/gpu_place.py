"""Where and with what a GPU is measured: the device, its clock, the sizes of kernels and of the model. For `gpu`."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from bench import gpu_decode
from bench.gpu_cases import Setup
from bench.gpu_limits import COPY_BYTES, PRODUCT_SIZE
from bench.gpu_timing import Clock, CudaClock

from naru_operator.core.roofline.models import MODELS, Model
from naru_worker.adapters.ops.cuda.device import open_gpu


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU; tests have the CPU and small sizes instead."""

    name: str
    setup: Setup
    clock: Clock
    copy_bytes: int = COPY_BYTES
    product_size: int = PRODUCT_SIZE
    model: Model = MODELS[gpu_decode.MODEL]
    batches: Sequence[int] = gpu_decode.BATCHES
    context: int = gpu_decode.CONTEXT


def gpu_place() -> Place:
    """The GPU that the backend takes.

    Raises:
        LoadError: there is none that it can use.
    """
    gpu = open_gpu()
    setup = Setup(gpu.torch_device, gpu.arch, gpu.activation_dtype)
    return Place(gpu.name, setup, CudaClock(gpu.torch_device))


def release_memory() -> None:
    """Gives the GPU's memory back to the driver: servers that are started next look at what is free."""
    gc.collect()
    if torch.cuda.is_available():
        open_gpu().release()
