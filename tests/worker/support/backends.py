"""Finds backends by name and loads runners on them for tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.adapters.weights.opening import open_checkpoint

BACKENDS = ("ref", "cpu")


def backend_module(name: str) -> Any:
    """The backend's module, or a skip that says what is missing here."""
    if name == "ref":
        pytest.importorskip("torch", reason="the ref backend needs torch")
    return importlib.import_module(f"naru_worker.adapters.ops.{name}")


def load(
    backend: str,
    path: Path,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    max_num_tokens: int = 512,
    max_num_seqs: int = 32,
    max_model_len: int = 1024,
    kv_format: Any = "f32",
    num_threads: int = 1,
) -> Runner:
    """A runner on the model at the path.

    One thread: with more, a machine that other work keeps busy lets torch's threads wait for one another at each
    operation.
    """
    options = RunnerOptions(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_threads=num_threads,
        kv_format=kv_format,
    )
    runner: Runner = backend_module(backend).load_runner(open_checkpoint(path), options)
    return runner
