"""What an arena is, however its memory comes: a range of addresses of which parts have memory behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class HostSpan(Protocol):
    """Pinned bytes of the host, such as a slot of the pinned pool."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def num_bytes(self) -> int:
        """How many."""


class DeviceArena(Protocol):
    """The weights or the KV cache of one model. One thread at a time calls it. Offsets count from its first byte."""

    reason: str
    """Empty, or why memory is not mapped on demand but taken whole, for good."""

    @property
    def reserved_bytes(self) -> int:
        """Size of the range."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory behind them, in whole chunks."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are ensured: also what a copy for sleeping takes."""

    @property
    def is_asleep(self) -> bool:
        """Whether nothing may be touched until `wake`."""

    def ensure(self, first_byte: int, num_bytes: int) -> None:
        """Puts memory behind bytes that have none; all or nothing. Content of new memory is undefined.

        Raises:
            OutOfDeviceMemory: there is no room.
            DeviceError: the device refused.
        """

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Ends the use of bytes: their content is void, and chunks that no used byte lies in go back to the pool.

        Returns the bytes that went. No running kernel touches them. Of a sleeping arena whose content is kept nothing
        can be released.

        Raises:
            DeviceError: the device refused for some chunks, which stay mapped; the next `release` tries them again.
        """

    def sleep(self, spans: Sequence[HostSpan] | None = None) -> int:
        """Takes all memory away and keeps the addresses; returns the bytes that went back to the pool.

        With `spans` the used bytes are copied there first, in order of address; without, they are void. The device has
        done all work that it was given with them.

        Raises:
            ValueError: the spans are smaller than what is used; nothing has changed.
            DeviceError: a copy failed, and nothing has changed, or some chunks stay mapped until `wake` or `close`.
        """

    def wake(self) -> None:
        """Puts memory behind all used bytes again, at the same addresses, and copies back what `sleep` has copied.

        Raises:
            OutOfDeviceMemory: there is no room; it sleeps on.
            DeviceError: the device refused; it sleeps on.
        """

    def tensor(self, first_byte: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view, on the device; its first byte must be in use. Dead once the arena is closed."""

    def close(self) -> None:
        """Gives all back, addresses too. Tensors over it are dead. Nothing happens the second time.

        Raises:
            DeviceError: the device refused; it may be tried again.
        """
