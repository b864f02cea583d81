"""What goes wrong with a GPU's memory."""

from __future__ import annotations

from naru_proto.errors import Unavailable
from naru_worker.adapters.ops.protocol import DeviceFault


class DeviceError(DeviceFault):
    """A call to the device failed. `name` is CUDA's: ``CUDA_ERROR_ECC_UNCORRECTABLE``."""

    def __init__(self, call: str, name: str, detail: str = "") -> None:
        super().__init__(f"{call} failed: {name}{f' ({detail})' if detail else ''}")
        self.call = call
        self.name = name


class OutOfDeviceMemory(Unavailable):
    """No room for so many bytes; nothing was mapped. Smaller or later demands may be met."""

    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(f"{num_bytes} bytes of device memory are not to be had: {reason}")
        self.num_bytes = num_bytes
        """What was missing."""


class VirtualMemoryUnsupported(Unavailable):
    """This driver or device cannot map memory; `message` says why. A fixed buffer still works."""
