"""Opens a worker's group of ranks: on GPUs with NCCL, on the CPU with gloo."""

from __future__ import annotations

import os

import torch

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cuda.interpreter import is_interpreted
from naru_worker.adapters.ops.tensor_parallel.errors import RankLost
from naru_worker.adapters.ops.tensor_parallel.joining import Transport
from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup

_STEP_SHARE = 0.75
"""The rest of a step's time is for asking all ranks."""


def open_group(backend: str, size: int, step_timeout_s: float) -> RankGroup:
    """A group of `size` ranks, of which this process is the first. They end with the thread that calls.

    `step_timeout_s`: after which the engine takes a step for hung. Before that it is found out which rank does.

    Raises:
        LoadError: this process may see fewer GPUs, or a rank does not start; says which, and what to do.
    """
    transport: Transport = "nccl" if backend == "cuda" and not is_interpreted() else "gloo"
    if transport == "nccl" and (num_visible := torch.cuda.device_count()) < size:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise LoadError(
            f"num_accelerators is {size}, and this process sees {num_visible} GPUs (CUDA_VISIBLE_DEVICES is "
            f"{'not set' if visible is None else repr(visible)}); give the pod {size} of them, or lower "
            "num_accelerators",
            param="num_accelerators",
        )
    try:
        return RankGroup(size, transport, timeout_s=_STEP_SHARE * step_timeout_s)
    except (RankLost, OSError) as exc:
        reason = exc.message if isinstance(exc, RankLost) else f"{type(exc).__name__}: {exc}"
        raise LoadError(
            f"the processes of {size} ranks cannot be brought together: {reason}; what they said stands above",
            param="num_accelerators",
        ) from exc
