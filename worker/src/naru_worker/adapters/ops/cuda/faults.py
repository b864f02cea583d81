"""What an error of torch, of Triton's launcher or of a CUDA library says about the device: it failed, or has no room.

All of them are plain RuntimeErrors with a text. Used wherever work is launched or waited for.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from naru_proto.errors import Unavailable
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError

_OF_CUDA = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
"""How texts begin: of torch over the runtime and cuBLAS, of torch over the driver, of Triton's launcher."""
_NO_ROOM = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_OF_ONE_CALL = (
    "invalid argument",
    "invalid configuration argument",
    "too many resources requested",
    "too many blocks in cooperative launch",
    "no kernel image is available",
    "kernel image is invalid",
    "invalid device function",
    "named symbol not found",
    "PTX was compiled with an unsupported toolchain",
    "stream is capturing",
    "error during capture",
    "CUBLAS_STATUS_INVALID_VALUE",
    "CUBLAS_STATUS_NOT_SUPPORTED",
)
"""What CUDA refuses and goes on from: the same request would end every worker that it was sent to. Whatever is not
here, such as an address that is nobody's, has ended the process's context: no later call can succeed."""


def is_out_of_memory(exc: RuntimeError) -> bool:
    """Whether the device has no room, which ends the step that asked for it."""
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    return _is_of_cuda(exc) and _tells(exc, _NO_ROOM)


def is_device_fault(exc: RuntimeError) -> bool:
    """Whether the device has failed for good: launches, copies and waits tell of what came before them."""
    return _is_of_cuda(exc) and not is_out_of_memory(exc) and not _tells(exc, _OF_ONE_CALL)


def device_error(call: str, exc: RuntimeError) -> DeviceError:
    """A failed device, as one of our errors."""
    return DeviceError(call, "CUDA_ERROR", _first_line(exc))


@contextmanager
def told_apart(call: str, what: str) -> Iterator[None]:
    """Around work of the device: its errors become ours, others go on as they are.

    Args:
        call: For the message of a failed device.
        what: For that of one without room.

    Raises:
        DeviceError: the device has failed.
        Unavailable: it has no room.
    """
    try:
        yield
    except RuntimeError as exc:
        if is_out_of_memory(exc):
            # The error lives until somebody was told; what the step had must be free before.
            traceback.clear_frames(exc.__traceback__)
            raise Unavailable(f"{what} has no room on the GPU: {_first_line(exc)}") from exc
        if is_device_fault(exc):
            raise device_error(call, exc) from exc
        raise


def _is_of_cuda(exc: RuntimeError) -> bool:
    accelerator_error: type[RuntimeError] | None = getattr(torch, "AcceleratorError", None)  # of torch 2.8 and newer
    is_torchs = accelerator_error is not None and isinstance(exc, accelerator_error)
    return is_torchs or _tells(exc, _OF_CUDA)


def _tells(exc: RuntimeError, parts: tuple[str, ...]) -> bool:
    text = str(exc)
    return any(part in text for part in parts)


def _first_line(exc: RuntimeError) -> str:
    """Without torch's advice."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
