"""The calls to a device that arenas need: address ranges, physical chunks, and which lies behind which."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class MemoryInfo(NamedTuple):
    """Bytes of the whole device, whoever uses them."""

    free_bytes: int
    total_bytes: int


class Driver(Protocol):
    """One device. Thread-safe. Addresses, sizes and offsets are multiples of `granularity`, but for those of the host
    and of copies.

    Every method raises `DeviceError` where the device refuses, and has then changed nothing.
    """

    device: int
    """Its ordinal."""
    granularity: int
    """Bytes."""

    def reserve(self, num_bytes: int) -> int:
        """The first address of a new range; nothing lies behind it yet."""

    def free_range(self, address: int, num_bytes: int) -> None:
        """Ends a range as it was reserved, with nothing mapped into it."""

    def create(self, num_bytes: int) -> Any:
        """A handle of so many bytes of physical memory.

        Raises:
            OutOfDeviceMemory: the device has no more.
        """

    def destroy(self, handle: Any) -> None:
        """Gives physical memory back. It is mapped nowhere."""

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Puts a whole chunk behind addresses of a reserved range; nobody may touch them yet."""

    def set_access(self, address: int, num_bytes: int) -> None:
        """Lets kernels and copies read and write addresses, all of which are mapped."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Takes the chunk away that was mapped at exactly these addresses. No running kernel uses them."""

    def memory_info(self) -> MemoryInfo:
        """What the device has."""

    def pin(self, host_address: int, num_bytes: int) -> None:
        """Keeps pages of the host where they are, for as long as the process lives: the device copies them itself."""

    def copy_to_host(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copies, and returns when it is done. Waits for no other work."""

    def copy_to_device(self, address: int, host_address: int, num_bytes: int) -> None:
        """Copies, and returns when it is done."""
