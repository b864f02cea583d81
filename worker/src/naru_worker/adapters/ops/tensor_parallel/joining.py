"""How ranks find one another: process groups of torch.distributed, over the machine's loopback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from naru_worker.adapters.ops.tensor_parallel.collectives import TorchCollectives
from naru_worker.core.group_sizes import group_sizes

Transport = Literal["gloo", "nccl"]
"""gloo: tensors of the CPU. nccl: rank r has the r-th of the GPUs that rank 0's process may see."""

HOST = "127.0.0.1"
_TRANSPORT_SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}

_dist: Any = dist
"""Not all that it offers is declared."""


def open_store(size: int) -> Any:
    """Where rank 0 lets the others find it; `port` is what they must know."""
    return _dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)


def find_store(port: int, size: int, timeout_s: float) -> Any:
    """Rank 0's store, from another rank."""
    return _dist.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(
    store: Any, collectives: Mapping[int, TorchCollectives], size: int, transport: Transport, timeout_s: float
) -> None:
    """Makes this process a rank; returns when all have joined and can talk. Exchanges fail after `timeout_s`.

    `collectives`: of this rank, by the size of their groups; they get theirs.

    Raises:
        RuntimeError: they have not joined in time, or this process is a rank already.
        CollectiveFailed: they cannot talk.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a group already; a process can be one once at a time")
    _stay_on_this_machine()
    timeout = timedelta(seconds=timeout_s)
    rank = collectives[size].rank
    dist.init_process_group(transport, store=store, rank=rank, world_size=size, timeout=timeout)
    # All ranks make all groups, in one order, whether they are in them or not.
    for smaller in (each for each in group_sizes(size) if 1 < each < size):
        group = _dist.new_group(list(range(smaller)), timeout=timeout)
        if smaller in collectives:
            collectives[smaller].group = group
    # What stands in the way of a connection shows now, not with the first request.
    nothing = torch.zeros(1, 1, device="cuda" if transport == "nccl" else "cpu")
    collectives[size].add(nothing, nothing).cpu()


def leave(transport: Transport, *, is_lost: bool) -> None:
    """Ends this process's part in the group. NCCL waits for lost ranks unless it is aborted."""
    if not dist.is_initialized():
        return
    abort = getattr(_dist.distributed_c10d, "_abort_process_group", None)
    if is_lost and transport == "nccl" and abort is not None:
        abort()
        return
    dist.destroy_process_group()


def _stay_on_this_machine() -> None:
    """Has both transports use the loopback, whatever the host's name resolves to; NCCL's data go by NVLink or PCIe.

    For the life of the process: NCCL connects at the first exchange. Its watchdog would end the whole process when an
    exchange is late; who waits here does that himself.
    """
    for name, value in _TRANSPORT_SETTINGS.items():
        os.environ.setdefault(name, value)
