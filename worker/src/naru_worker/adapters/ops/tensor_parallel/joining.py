"""How ranks find one another: torch.distributed's default process group, over the machine's loopback."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

Transport = Literal["gloo", "nccl"]
"""gloo: tensors of the CPU. nccl: rank r has the r-th of the GPUs that rank 0's process may see."""

HOST = "127.0.0.1"

_dist: Any = dist
"""Not all that it offers is declared."""


def open_store(size: int) -> Any:
    """Where rank 0 lets the others find it; `port` is what they must know."""
    return _dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)


def find_store(port: int, size: int, timeout_s: float) -> Any:
    """Rank 0's store, from another rank."""
    return _dist.TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(store: Any, rank: int, size: int, transport: Transport, timeout_s: float) -> None:
    """Makes this process a rank; returns when all have joined. Exchanges fail after `timeout_s`.

    Raises:
        RuntimeError: they have not joined in time, or this process is a rank already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a group already; a process can be one once at a time")
    with _on_this_machine():
        dist.init_process_group(
            transport, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )


def leave(transport: Transport, *, is_lost: bool) -> None:
    """Ends this process's part in the group. NCCL waits for lost ranks unless it is aborted."""
    if not dist.is_initialized():
        return
    abort = getattr(_dist.distributed_c10d, "_abort_process_group", None)
    if is_lost and transport == "nccl" and abort is not None:
        abort()
        return
    dist.destroy_process_group()


@contextlib.contextmanager
def _on_this_machine() -> Iterator[None]:
    """Has both transports use the loopback, whatever the host's name resolves to; NCCL's data go by NVLink or PCIe.

    NCCL's watchdog would end the whole process when an exchange is late; who waits here does that himself.
    """
    settings = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
