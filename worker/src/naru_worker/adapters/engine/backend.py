"""Picks the module that computes. Each offers the functions named in `RunnerOptions`; imports are as late as can be."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Protocol, cast

from naru_worker.adapters.engine.batch_runner import EncoderRunner
from naru_worker.adapters.ops.encoder_options import EncoderOptions
from naru_worker.adapters.ops.protocol import FloatArray, KVFormat, Runner, RunnerBytes, RunnerOptions
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare
from naru_worker.core.encoder_config import EncoderConfig
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.residency import KVCacheDtype

_MODULES = {
    "cpu": "naru_worker.adapters.ops.cpu",
    "cuda": "naru_worker.adapters.ops.cuda.backend",
    "ref": "naru_worker.adapters.ops.ref",
}
_ENCODER_MODULES = {
    "cpu": "naru_worker.adapters.ops.cpu_encoder",
    "cuda": "naru_worker.adapters.ops.cuda.encoder",
    "ref": "naru_worker.adapters.ops.ref_encoder",
}


class Backend(Protocol):
    """A module of kernels."""

    def load_runner(self, checkpoint: Checkpoint, options: RunnerOptions, *, on_share: OnShare | None = None) -> Runner:
        """Reads the weights and allocates the KV cache. What `on_share` raises ends it, and nothing is held."""

    def runner_bytes(self, checkpoint: Checkpoint, options: RunnerOptions) -> RunnerBytes:
        """What a runner will take; reads shapes and formats."""

    def kv_block_bytes(self, config: ModelConfig, options: RunnerOptions) -> int:
        """Bytes of one KV block over all layers."""


class EncoderBackend(Protocol):
    """A module of kernels, as encoders need them."""

    def load_encoder(
        self, config: EncoderConfig, tensors: Iterable[tuple[str, FloatArray]], options: EncoderOptions
    ) -> EncoderRunner:
        """Takes the weights over, by name."""

    def weight_bytes(self, config: EncoderConfig) -> int:
        """Bytes of the weights as they will lie in memory."""

    def workspace_bytes(self, config: EncoderConfig, options: EncoderOptions) -> int:
        """Bytes of the activations of a batch; all models of a process share one workspace."""


def open_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ImportError: it is not installed here.
    """
    return cast(Backend, importlib.import_module(_MODULES[name]))


def open_encoder_backend(name: str) -> EncoderBackend:
    """What the backend of that name offers encoders.

    Raises:
        ImportError: it is not installed here.
    """
    return cast(EncoderBackend, importlib.import_module(_ENCODER_MODULES[name]))


def kv_format(name: str, kv_cache_dtype: KVCacheDtype) -> KVFormat:
    """Element type of the cache. Left to the backend, half precision where speed counts, full in the oracle."""
    if kv_cache_dtype == "auto":
        return "f32" if name == "ref" else "f16"
    return "int8" if kv_cache_dtype == "int8" else "f16"


def backend_isa(name: str) -> str:
    """Instruction set the kernels of a backend run on here; empty where it is not ours to choose."""
    if name != "cpu":
        return ""
    from naru_worker.adapters.ops.native_lib import best_isa
    from naru_worker.native.build import find_library
    from naru_worker.native.isa import detect_isa

    isa = detect_isa()
    # What is not compiled yet is compiled with the first model, and tried then.
    return best_isa() if find_library(isa) is not None else isa
