"""Pinned memory of the host, made once: slots of one size that copies to and from a device go through.

Pinning is slow (a few GB a second), so nobody pins for a model or a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


class Event(Protocol):
    """A mark in a device's stream, such as ``torch.cuda.Event`` once it is recorded."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""


@dataclass(frozen=True, slots=True, eq=False)
class PinnedSlot:
    """Some pinned bytes; whoever took it may use all of them until it is given back."""

    index: int
    array: ByteArray
    """(num_bytes,) of the pool's memory."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.array.ctypes.data

    @property
    def num_bytes(self) -> int:
        """Size."""
        return len(self.array)


class NoPinnedSlot(TimeoutError):
    """No slot came free in time."""


class PinnedPool:
    """Slots over one buffer. Thread-safe.

    A slot may be given back with an event: it goes to another taker once the device has passed that.
    """

    def __init__(self, buffer: ByteArray, slot_bytes: int, num_ready: int | None = None) -> None:
        """Cuts a buffer into slots; what is left at its end stays unused.

        `num_ready`: so many can be taken at once, the others as `add_ready` says; None: all.

        Raises:
            ValueError: not even one slot fits.
        """
        if slot_bytes < 1 or len(buffer) < slot_bytes:
            raise ValueError(f"slots of {slot_bytes!r} bytes do not fit a buffer of {len(buffer)}; make it larger")
        self.slot_bytes = slot_bytes
        self.num_slots = len(buffer) // slot_bytes
        self._changed = threading.Condition()
        slots = [PinnedSlot(i, buffer[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(self.num_slots)]
        split = self.num_slots if num_ready is None else num_ready
        self._free, self._to_come = deque(slots[:split]), deque(slots[split:])
        self._busy: deque[tuple[Event, PinnedSlot]] = deque()
        """Given back, but the device may still be at them; the oldest first."""
        self._taken: set[int] = set()

    @property
    def num_taken(self) -> int:
        """Slots that somebody has."""
        return len(self._taken)

    def add_ready(self, num_slots: int) -> None:
        """So many more can be taken from now on, or all that there are."""
        with self._changed:
            for _ in range(min(num_slots, len(self._to_come))):
                self._free.append(self._to_come.popleft())
            self._changed.notify_all()

    def take(self, num_slots: int = 1, timeout_s: float = 60.0) -> list[PinnedSlot]:
        """So many slots, all or none; waits for the device, and for other threads to give some back.

        Raises:
            ValueError: the pool has not so many.
            NoPinnedSlot: they did not come free in time.
        """
        if num_slots > self.num_slots:
            raise ValueError(f"{num_slots} slots are asked for, and the pool has {self.num_slots}; make it larger")
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                self._collect()
                if len(self._free) >= num_slots:
                    slots = [self._free.popleft() for _ in range(num_slots)]
                    self._taken.update(slot.index for slot in slots)
                    return slots
                waiting = self._busy.popleft() if self._busy else None
                if waiting is None and not self._changed.wait(deadline_s - time.monotonic()):
                    raise NoPinnedSlot(
                        f"{num_slots} pinned slots of {self.slot_bytes} bytes did not come free in {timeout_s} s: "
                        f"{self.num_taken} of {self.num_slots} are taken"
                    )
            if waiting is not None:
                self._await(*waiting)

    def give_back(self, slot: PinnedSlot, event: Event | None = None) -> None:
        """Ends the use of a slot, at once or when the device has passed an event.

        Raises:
            ValueError: nobody has taken this slot.
        """
        with self._changed:
            if slot.index not in self._taken:
                raise ValueError(f"pinned slot {slot.index} is given back, but nobody has taken it")
            self._taken.remove(slot.index)
            if event is None:
                self._free.append(slot)
            else:
                self._busy.append((event, slot))
            self._changed.notify_all()

    def _collect(self) -> None:
        """Frees the slots whose events have passed; called with the lock."""
        still_busy = [(event, slot) for event, slot in self._busy if not event.query()]
        if len(still_busy) < len(self._busy):
            waiting = {slot.index for _, slot in still_busy}
            self._free.extend(slot for _, slot in self._busy if slot.index not in waiting)
            self._busy = deque(still_busy)

    def _await(self, event: Event, slot: PinnedSlot) -> None:
        """Waits without the lock; others may take and give meanwhile. Should waiting fail, the slot stays busy."""
        try:
            event.synchronize()
        except BaseException:
            with self._changed:
                self._busy.append((event, slot))
            raise
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()


def make_pinned_pool(num_slots: int, slot_bytes: int, *, is_pinned: bool = True) -> PinnedPool:
    """Pins so much memory, once; not pinned: ordinary memory, for machines without a GPU.

    Raises:
        ValueError: less than one slot or one byte.
    """
    import torch

    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots!r}; one is the least")
    buffer = torch.empty(num_slots * max(0, slot_bytes), dtype=torch.uint8, pin_memory=is_pinned)
    return PinnedPool(buffer.numpy(), slot_bytes)
