"""A device's memory without a device: keeps all state, refuses misuse, and fails where it is told to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from naru_worker.adapters.ops.cuda.memory.driver import MemoryInfo
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory

BASE = 1 << 40


@dataclass
class Mapping:
    """A chunk behind addresses."""

    handle: int
    num_bytes: int
    is_accessible: bool = False


@dataclass
class FakeCudaMemory:
    """A `Driver`. `capacity_bytes` is what the whole device has. Misuse is an AssertionError: never a device's."""

    granularity: int = 64
    capacity_bytes: int = 1 << 20
    device: int = 0
    ranges: dict[int, int] = field(default_factory=dict)
    """First address to size."""
    chunks: dict[int, bytearray] = field(default_factory=dict)
    """Handle to content."""
    mappings: dict[int, Mapping] = field(default_factory=dict)
    """By address."""
    calls: list[str] = field(default_factory=list)
    fails_in: int = 0
    """The n-th call from now fails, once; 0: none."""
    fails_always: frozenset[str] = frozenset()
    """Calls that fail whenever they are made."""
    error_name: str = "CUDA_ERROR_UNKNOWN"
    _next_handle: int = 1
    _next_address: int = BASE

    def reserve(self, num_bytes: int) -> int:
        self._call("cuMemAddressReserve", num_bytes)
        assert num_bytes > 0
        address = self._next_address
        # A gap, so that one range's end is no other's beginning.
        self._next_address += num_bytes + self.granularity
        self.ranges[address] = num_bytes
        return address

    def free_range(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)
        assert self.ranges.get(address) == num_bytes, "a range is freed as it was reserved"
        assert not any(address <= at < address + num_bytes for at in self.mappings), "chunks are mapped into the range"
        del self.ranges[address]

    def create(self, num_bytes: int) -> int:
        self._call("cuMemCreate", num_bytes)
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise OutOfDeviceMemory(num_bytes, "the fake has no more")
        handle = self._next_handle
        self._next_handle += 1
        self.chunks[handle] = bytearray(b"\xee" * num_bytes)
        return handle

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease")
        assert handle in self.chunks, "a chunk is given back that is not there"
        assert all(mapping.handle != handle for mapping in self.mappings.values()), "the chunk is still mapped"
        del self.chunks[handle]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, num_bytes)
        assert len(self.chunks[handle]) == num_bytes, "a chunk is mapped whole"
        assert any(at <= address and address + num_bytes <= at + size for at, size in self.ranges.items())
        assert all(
            address + num_bytes <= at or at + mapping.num_bytes <= address for at, mapping in self.mappings.items()
        ), "addresses are mapped twice"
        assert all(mapping.handle != handle for mapping in self.mappings.values()), "a chunk is mapped twice"
        self.mappings[address] = Mapping(handle, num_bytes)

    def set_access(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes)
        at = address
        while at < address + num_bytes:
            mapping = self.mappings[at]
            mapping.is_accessible = True
            at += mapping.num_bytes
        assert at == address + num_bytes, "access is set for whole chunks"

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)
        assert address in self.mappings, "what is not mapped is unmapped"
        assert self.mappings[address].num_bytes == num_bytes
        del self.mappings[address]

    def memory_info(self) -> MemoryInfo:
        self._call("cuMemGetInfo")
        return MemoryInfo(self.capacity_bytes - self.used_bytes, self.capacity_bytes)

    def pin(self, host_address: int, num_bytes: int) -> None:
        self._call("cuMemHostRegister")

    def copy_to_host(self, host_address: int, address: int, num_bytes: int) -> None:
        self._call("cuMemcpyDtoH")
        ctypes.memmove(host_address, self.read(address, num_bytes), num_bytes)

    def copy_to_device(self, address: int, host_address: int, num_bytes: int) -> None:
        self._call("cuMemcpyHtoD")
        self.write(address, ctypes.string_at(host_address, num_bytes))

    @property
    def used_bytes(self) -> int:
        """Of all chunks there are."""
        return sum(map(len, self.chunks.values()))

    def read(self, address: int, num_bytes: int) -> bytes:
        """As a kernel would: an AssertionError where it would fault."""
        places = [self._byte(at) for at in range(address, address + num_bytes)]
        return bytes(chunk[offset] for chunk, offset in places)

    def write(self, address: int, content: bytes) -> None:
        """As a kernel would."""
        for i, value in enumerate(content):
            chunk, offset = self._byte(address + i)
            chunk[offset] = value

    def _byte(self, address: int) -> tuple[bytearray, int]:
        for at, mapping in self.mappings.items():
            if at <= address < at + mapping.num_bytes:
                assert mapping.is_accessible, "the chunk may not be touched yet"
                return self.chunks[mapping.handle], address - at
        raise AssertionError(f"nothing lies behind address {address:#x}")

    def _call(self, name: str, *aligned: int) -> None:
        assert all(number % self.granularity == 0 for number in aligned), "not a multiple of the granularity"
        self.calls.append(name)
        is_due = self.fails_in == 1
        self.fails_in = max(0, self.fails_in - 1)
        if is_due or name in self.fails_always:
            if name == "cuMemCreate" and self.error_name == "CUDA_ERROR_OUT_OF_MEMORY":
                raise OutOfDeviceMemory(aligned[0], "the fake was told so")
            raise DeviceError(name, self.error_name)
