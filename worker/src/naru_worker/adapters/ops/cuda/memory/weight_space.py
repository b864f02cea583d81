"""The weights of one model in an arena: put there through pinned slots, and taken away and brought back as a whole.

Their addresses stay while the model sleeps, so that CUDA graphs which hold them go on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.memory.device_arena import DeviceArena
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory
from naru_worker.adapters.ops.cuda.memory.pinned_pool import Event, PinnedPool, PinnedSlot

ALIGNMENT_BYTES = 256
_TENSORS_PER_LAYER = 64
"""More than any layer has, scales and biases included."""

Send = Callable[[Tensor, Tensor], Event]
"""Begins to copy (target, source), and gives the mark of its end. All copies of a space go one after another."""


def space_bytes(weight_bytes: int, num_layers: int) -> int:
    """Addresses that a model of so many bytes of weights takes, gaps for alignment included."""
    return weight_bytes + ALIGNMENT_BYTES * _TENSORS_PER_LAYER * (num_layers + 1)


def send_async(target: Tensor, source: Tensor) -> Event:
    """On torch's current stream."""
    target.copy_(source, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class WeightSpace:
    """Tensors one behind the other, in the order they were placed. Not thread-safe."""

    def __init__(
        self,
        memory: DeviceMemory,
        weight_bytes: int,
        num_layers: int,
        pool: PinnedPool | None = None,
        send: Send = send_async,
    ) -> None:
        """Takes the memory for all weights before the first is read. Without a pool copies are torch's plain ones.

        Raises:
            OutOfDeviceMemory: there is no room; nothing is held.
            DeviceError: the device refused.
        """
        self.arena: DeviceArena = memory.make_arena(space_bytes(weight_bytes, num_layers))
        self._pool = pool
        self._send = send
        self._end = 0
        self._last: Event | None = None
        self._kept: tuple[PinnedPool, list[PinnedSlot]] | None = None
        try:
            self.arena.ensure(0, weight_bytes)
        except BaseException:
            self.arena.close()
            raise

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the CPU, in the arena; the copy may still be on its way (`finish`).

        Raises:
            OutOfDeviceMemory: gaps took more room than there is.
            DeviceError: the device refused.
            NoPinnedSlot: the pool is used up by others.
        """
        start = -(-self._end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.arena.ensure(start, tensor.nbytes)
        target = self.arena.tensor(start, tensor.shape, tensor.dtype)
        if self._pool is None:
            target.copy_(tensor)
        else:
            self._upload(self._pool, target, tensor.contiguous())
        self._end = start + tensor.nbytes
        return target

    def finish(self) -> None:
        """Waits until all that was placed is there."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def sleep(self, pool: PinnedPool | None) -> int:
        """Gives the memory to others; returns the bytes. The content goes into slots of a pool, or is void.

        Raises:
            ValueError: the pool is too small; nothing has changed.
            NoPinnedSlot: too many of its slots are taken; nothing has changed.
            DeviceError: see `DeviceArena.sleep`.
        """
        self.finish()
        if self.arena.is_asleep:
            return 0
        if pool is None:
            return self.arena.sleep()
        slots = pool.take(-(-self.arena.used_bytes // pool.slot_bytes), timeout_s=0.0)
        self._kept = (pool, slots)
        try:
            return self.arena.sleep(slots)
        finally:
            if not self.arena.is_asleep:
                self._give_back()

    def wake(self) -> None:
        """All weights at their addresses again.

        Raises:
            OutOfDeviceMemory: there is no room; it sleeps on.
            DeviceError: the device refused; it sleeps on.
        """
        self.arena.wake()
        self._give_back()

    def close(self) -> None:
        """Gives all back; tensors that were placed are dead.

        Raises:
            DeviceError: the device refused; it may be tried again.
        """
        self.finish()
        self.arena.close()
        self._give_back()

    def _upload(self, pool: PinnedPool, target: Tensor, source: Tensor) -> None:
        to, given = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
        for at in range(0, len(given), pool.slot_bytes):
            piece = given[at : at + pool.slot_bytes]
            [slot] = pool.take()
            event = None
            try:
                pinned = torch.from_numpy(slot.array)[: len(piece)]
                pinned.copy_(piece)
                event = self._last = self._send(to[at : at + len(piece)], pinned)
            finally:
                pool.give_back(slot, event)

    def _give_back(self) -> None:
        if self._kept is not None:
            pool, slots = self._kept
            self._kept = None
            for slot in slots:
                pool.give_back(slot)
