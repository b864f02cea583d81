"""The GPU that this process computes on, or the CPU under Triton's interpreter, where tests compute."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cuda.interpreter import is_interpreted
from naru_worker.adapters.ops.cuda.kernels.compile_case import tuned_arch
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory, open_device_memory
from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool, make_pinned_pool
from naru_worker.adapters.ops.cuda.recording import empty_torch_cache

_log = logging.getLogger(__name__)

SLOT_BYTES = 8 << 20
"""Of pinned memory: a copy of so much takes a fraction of a millisecond, and the start of one is nothing beside it."""
_NUM_UPLOAD_SLOTS = 4
"""Two for each of the loads that usually run at once: one is filled while the other one is on its way."""
_INTERPRETED_ARCH = 80
"""Its tiles are the smallest."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """Where tensors live and which tiles kernels use."""

    torch_device: torch.device
    arch: int
    """One of `compile_case.ARCHITECTURES`."""
    name: str
    total_bytes: int
    """Memory of the GPU; of the interpreter, none that is known."""
    is_interpreted: bool
    capability: tuple[int, int] = (8, 0)
    """Compute capability, of which `arch` is the nearest that kernels are tuned for."""

    def available_bytes(self) -> int:
        """What the driver has left, and what torch's allocator keeps unused."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + kept

    def release(self) -> None:
        """Gives what nobody uses back to the driver."""
        open_gpu_memory().trim()
        empty_torch_cache()

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of activations, and of a KV cache of 16 bits. The interpreter's products of bfloat16 are wrong."""
        return torch.float32 if self.is_interpreted else torch.bfloat16


@cache
def open_gpu() -> GpuDevice:
    """The first GPU that this process may see (`CUDA_VISIBLE_DEVICES`); opened once.

    Raises:
        LoadError: there is none, its driver does not fit, or it is too old; says which, and what to do.
    """
    if is_interpreted():
        return GpuDevice(torch.device("cpu"), _INTERPRETED_ARCH, "Triton's interpreter on the CPU", 0, True)
    if torch.version.cuda is None:
        raise LoadError("this torch is built without CUDA; install the worker with naru[cuda], or use backend cpu")
    if not torch.cuda.is_available():
        raise LoadError(_why_unavailable())
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    try:
        capability = (properties.major, properties.minor)
        arch = tuned_arch(capability)
    except ValueError as exc:
        raise LoadError(f"{properties.name}: {exc}; use backend cpu on this machine") from exc
    return GpuDevice(torch.device("cuda", index), arch, properties.name, properties.total_memory, False, capability)


@cache
def open_gpu_memory() -> DeviceMemory:
    """The GPU's memory for KV caches, of which the ledger decides who gets how much; opened once.

    Raises:
        LoadError: see `open_gpu`.
    """
    gpu = open_gpu()
    # What torch keeps of large steps is missing elsewhere, and comes back when a large step comes.
    return open_device_memory(str(gpu.torch_device), gpu.total_bytes, make_room=empty_torch_cache)


@cache
def open_upload_slots() -> PinnedPool:
    """Pinned memory that weights go up through when models are loaded; made once, for all of them.

    Where the system refuses to pin, ordinary memory stands in: loads then wait for each copy.

    Raises:
        LoadError: see `open_gpu`.
    """
    if not open_gpu().is_interpreted:
        try:
            return make_pinned_pool(_NUM_UPLOAD_SLOTS, SLOT_BYTES)
        except RuntimeError as exc:
            reason = str(exc).splitlines()[0]
            _log.warning("weights go up more slowly: %s; raise the limit of locked memory (ulimit -l)", reason)
    return make_pinned_pool(_NUM_UPLOAD_SLOTS, SLOT_BYTES, is_pinned=False)


def _why_unavailable() -> str:
    """What torch says when it is made to try."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as exc:
        reason = str(exc).strip().splitlines()[0]
    else:
        reason = "no device is visible"
    return (
        f"no GPU can be used: {reason}; check `nvidia-smi`, that the driver supports CUDA {torch.version.cuda}, and "
        "that the pod asks for a GPU (nvidia.com/gpu), or use backend cpu"
    )
