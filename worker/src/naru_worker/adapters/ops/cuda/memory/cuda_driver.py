"""The device calls over cuda-bindings.

Source: NVIDIA's CUDA driver API, virtual memory management.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from naru_worker.adapters.ops.cuda.memory.driver import MemoryInfo
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory, VirtualMemoryUnsupported

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaDriver:
    """One GPU, through its primary context: the one that torch uses. Thread-safe."""

    def __init__(self, device: int, api: Any | None = None) -> None:
        """Binds to a GPU; `api` stands in for the module ``cuda.bindings.driver``.

        Raises:
            VirtualMemoryUnsupported: there is no driver, or it or the GPU cannot map memory.
            DeviceError: the GPU does not answer.
        """
        self.device = device
        self._api = _load_api() if api is None else api
        self._threads = threading.local()
        try:
            self._call("cuInit", 0)
        except RuntimeError as exc:
            raise VirtualMemoryUnsupported(f"no NVIDIA driver is installed: {exc}") from exc
        [handle] = self._call("cuDeviceGet", device)
        attribute = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        [is_supported] = self._call("cuDeviceGetAttribute", attribute, handle)
        if not is_supported:
            raise VirtualMemoryUnsupported(f"GPU {device} does not support virtual memory management")
        [self._context] = self._call("cuDevicePrimaryCtxRetain", handle)
        self._properties = self._chunk_properties()
        self._access = self._access_rights()
        minimum = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        [granularity] = self._device_call("cuMemGetAllocationGranularity", self._properties, minimum)
        self.granularity = int(granularity)
        # Beside the steps of other models. To wait for the whole context is forbidden while another thread records a
        # graph, and would break that.
        [self._copies] = self._device_call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def reserve(self, num_bytes: int) -> int:
        """The first address of a new range."""
        [address] = self._device_call("cuMemAddressReserve", num_bytes, 0, 0, 0)
        return int(address)

    def free_range(self, address: int, num_bytes: int) -> None:
        """Ends a range."""
        self._device_call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Any:
        """A handle of physical memory.

        Raises:
            OutOfDeviceMemory: the GPU has no more.
        """
        try:
            [handle] = self._device_call("cuMemCreate", num_bytes, self._properties, 0)
        except DeviceError as exc:
            if exc.name == _OUT_OF_MEMORY:
                raise OutOfDeviceMemory(num_bytes, f"GPU {self.device} has no more") from exc
            raise
        return handle

    def destroy(self, handle: Any) -> None:
        """Gives physical memory back."""
        self._device_call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Puts a chunk behind addresses."""
        self._device_call("cuMemMap", address, num_bytes, 0, handle, 0)

    def set_access(self, address: int, num_bytes: int) -> None:
        """Lets this GPU read and write addresses."""
        self._device_call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes a chunk away from its addresses."""
        self._device_call("cuMemUnmap", address, num_bytes)

    def memory_info(self) -> MemoryInfo:
        """What the GPU has."""
        free_bytes, total_bytes = self._device_call("cuMemGetInfo")
        return MemoryInfo(int(free_bytes), int(total_bytes))

    def pin(self, host_address: int, num_bytes: int) -> None:
        """Pins pages of the host."""
        self._device_call("cuMemHostRegister", host_address, num_bytes, 0)

    def copy_to_host(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copies, and waits for it."""
        self._device_call("cuMemcpyDtoHAsync", host_address, address, num_bytes, self._copies)
        self._device_call("cuStreamSynchronize", self._copies)

    def copy_to_device(self, address: int, host_address: int, num_bytes: int) -> None:
        """Copies, and waits for it."""
        self._device_call("cuMemcpyHtoDAsync", address, host_address, num_bytes, self._copies)
        self._device_call("cuStreamSynchronize", self._copies)

    def _device_call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """A call in the GPU's context, which each thread has to be given once."""
        if not getattr(self._threads, "has_context", False):
            self._call("cuCtxSetCurrent", self._context)
            self._threads.has_context = True
        return self._call(name, *args)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        status, *results = getattr(self._api, name)(*args)
        if status != self._api.CUresult.CUDA_SUCCESS:
            raise DeviceError(name, getattr(status, "name", str(status)), f"GPU {self.device}")
        return tuple(results)

    def _chunk_properties(self) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device
        return properties

    def _access_rights(self) -> Any:
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


def _load_api() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as exc:
        raise VirtualMemoryUnsupported(
            f"the package cuda-bindings is not installed ({exc}); it comes with torch for CUDA"
        ) from exc
