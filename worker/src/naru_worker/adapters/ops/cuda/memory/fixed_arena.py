"""An arena without virtual memory: one tensor, taken whole. Where CUDA cannot map, and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from naru_worker.adapters.ops.cuda.memory.byte_ranges import ByteRanges
from naru_worker.adapters.ops.cuda.memory.device_arena import HostSpan
from naru_worker.adapters.ops.cuda.memory.device_view import tensor_bytes
from naru_worker.adapters.ops.cuda.memory.errors import OutOfDeviceMemory


class FixedArena:
    """Implements `DeviceArena`: what is ensured and released is only kept in mind.

    Sleeping gives nothing back, so content and addresses stay by themselves.
    """

    def __init__(self, num_bytes: int, device: torch.device | str, reason: str) -> None:
        """Takes all bytes; `reason`: why memory is not mapped on demand.

        Raises:
            ValueError: less than one byte.
            OutOfDeviceMemory: the device has no room.
        """
        if num_bytes < 1:
            raise ValueError(f"an arena of {num_bytes!r} bytes; one is the least")
        self.reason = reason
        try:
            self._bytes: torch.Tensor | None = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            raise OutOfDeviceMemory(num_bytes, f"{device} has no more") from exc
        if self._bytes.is_cuda:
            # Work that was launched before may still be at what torch had there; other streams do not wait for it.
            torch.cuda.current_stream(self._bytes.device).synchronize()
        self._reserved = num_bytes
        self._used = ByteRanges()
        self._is_asleep = False

    @property
    def reserved_bytes(self) -> int:
        """Size of the buffer."""
        return self._reserved

    @property
    def mapped_bytes(self) -> int:
        """All of the buffer, until it is closed."""
        return 0 if self._bytes is None else self._reserved

    @property
    def used_bytes(self) -> int:
        """Bytes that are ensured."""
        return self._used.num_bytes

    @property
    def is_asleep(self) -> bool:
        """Whether nothing may be touched."""
        return self._is_asleep

    def ensure(self, first_byte: int, num_bytes: int) -> None:
        """Keeps in mind that bytes are used."""
        stop = self._checked_stop(first_byte, num_bytes)
        if self._is_asleep:
            raise RuntimeError("the arena is asleep")
        self._used.add(first_byte, stop)

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Keeps in mind that bytes are not used any more; none go."""
        self._used.remove(first_byte, self._checked_stop(first_byte, num_bytes))
        return 0

    def sleep(self, spans: Sequence[HostSpan] | None = None) -> int:
        """Nothing goes, and nothing is copied."""
        self._buffer()
        self._is_asleep = True
        return 0

    def wake(self) -> None:
        """As it was."""
        self._buffer()
        self._is_asleep = False

    def tensor(self, first_byte: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view; its first byte must be in use, as in an arena that maps."""
        if not self._used.touches(first_byte, first_byte + 1):
            raise ValueError(f"byte {first_byte} is not in use; ensure it before a tensor begins there")
        stop = self._checked_stop(first_byte, tensor_bytes(shape, dtype))
        return self._buffer()[first_byte:stop].view(dtype).view(*shape)

    def close(self) -> None:
        """Lets the buffer go: its memory is free once no tensor over it is left."""
        self._bytes = None
        self._used.remove(0, self._reserved)

    def _buffer(self) -> torch.Tensor:
        if self._bytes is None:
            raise RuntimeError("the arena is closed")
        return self._bytes

    def _checked_stop(self, first_byte: int, num_bytes: int) -> int:
        self._buffer()
        if not 0 <= first_byte <= first_byte + num_bytes <= self._reserved:
            raise ValueError(
                f"bytes [{first_byte}, {first_byte + num_bytes}) lie outside the {self._reserved} of the arena"
            )
        return first_byte + num_bytes
