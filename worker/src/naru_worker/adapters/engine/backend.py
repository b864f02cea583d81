"""Picks the module that computes. Each offers the functions named in `RunnerOptions`; imports are as late as can be."""

from __future__ import annotations

import importlib
from typing import Literal, Protocol, cast

from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.model_config import ModelConfig

_MODULES = {"cpu": "naru_worker.adapters.ops.cpu", "ref": "naru_worker.adapters.ops.ref"}


class Backend(Protocol):
    """A module of kernels."""

    def load_runner(self, checkpoint: Checkpoint, options: RunnerOptions) -> Runner:
        """Reads the weights and allocates the KV cache."""

    def weight_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes of the weights as they will lie in memory."""

    def kv_block_bytes(self, config: ModelConfig, options: RunnerOptions) -> int:
        """Bytes of one KV block over all layers."""

    def workspace_bytes(self, config: ModelConfig, options: RunnerOptions) -> int:
        """Bytes of the activations of a step; all models of a process share one workspace."""


def open_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ImportError: it is not installed here.
    """
    return cast(Backend, importlib.import_module(_MODULES[name]))


def kv_format(name: str) -> Literal["f16", "f32"]:
    """Element type of the cache: half precision where speed counts, full in the oracle."""
    return "f32" if name == "ref" else "f16"


def backend_isa(name: str) -> str:
    """Instruction set the kernels of a backend run on here; empty where it is not ours to choose."""
    if name != "cpu":
        return ""
    from naru_worker.native.isa import detect_isa

    return str(detect_isa())
