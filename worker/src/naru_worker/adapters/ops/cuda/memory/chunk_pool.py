"""The physical memory of a process on one device: equal chunks that all arenas draw on and give back to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from naru_worker.adapters.ops.cuda.memory.driver import Driver
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError, OutOfDeviceMemory

CHUNK_BYTES = 2 << 20
"""What CUDA's drivers have as granularity on all GPUs so far."""


class ChunkPool:
    """Thread-safe. Chunks it has made, held by arenas or kept for reuse, never take more than the budget."""

    def __init__(
        self,
        driver: Driver,
        budget_bytes: int,
        max_idle_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        make_room: Callable[[], object] | None = None,
    ) -> None:
        """`max_idle_bytes`: how much of what comes back is kept for the next one; None: all. `make_room` has others
        give the device what they only keep: called once where it has no more, before that is the answer.

        Raises:
            ValueError: a size is out of range, or no multiple of the device's granularity.
        """
        if chunk_bytes < 1 or chunk_bytes % driver.granularity:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes!r}; it must be a multiple of the device's granularity, "
                f"{driver.granularity}"
            )
        if budget_bytes < 0 or (max_idle_bytes is not None and max_idle_bytes < 0):
            raise ValueError(f"budget_bytes is {budget_bytes!r} and max_idle_bytes {max_idle_bytes!r}; 0 is the least")
        self.driver = driver
        self.chunk_bytes = chunk_bytes
        self.budget_bytes = budget_bytes
        self._max_idle = (budget_bytes if max_idle_bytes is None else max_idle_bytes) // chunk_bytes
        self._make_room = make_room
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._num_held = 0
        """Chunks that arenas have, or that are being made for them."""
        self._num_leaving = 0
        """Chunks that are being given back to the device."""

    @property
    def held_bytes(self) -> int:
        """Of chunks that arenas have."""
        return self._num_held * self.chunk_bytes

    @property
    def idle_bytes(self) -> int:
        """Of chunks kept for reuse."""
        return len(self._idle) * self.chunk_bytes

    @property
    def free_bytes(self) -> int:
        """What the budget still allows, whole chunks; the device may have less."""
        return max(0, self.budget_bytes // self.chunk_bytes - self._num_held) * self.chunk_bytes

    def take(self, num_chunks: int) -> list[Any]:
        """Handles of so many chunks, with whatever content: all of them or none.

        Raises:
            OutOfDeviceMemory: the budget or the device has no more.
            DeviceError: the device refused.
        """
        with self._lock:
            if (self._num_held + self._num_leaving + num_chunks) * self.chunk_bytes > self.budget_bytes:
                raise OutOfDeviceMemory(
                    num_chunks * self.chunk_bytes,
                    f"{self.held_bytes} of the budget of {self.budget_bytes} bytes are in use",
                )
            self._num_held += num_chunks
            split = max(0, len(self._idle) - num_chunks)
            chunks, self._idle = self._idle[split:], self._idle[:split]
        # Making a chunk takes the device long; others may take and give meanwhile.
        try:
            while len(chunks) < num_chunks:
                chunks.append(self._created())
        except BaseException as exc:
            with self._lock:
                self._num_held -= num_chunks - len(chunks)
            self.give_back(chunks)
            if isinstance(exc, OutOfDeviceMemory):
                raise OutOfDeviceMemory(num_chunks * self.chunk_bytes, exc.message) from exc
            raise
        return chunks

    def _created(self) -> Any:
        try:
            return self.driver.create(self.chunk_bytes)
        except OutOfDeviceMemory:
            if self._make_room is None:
                raise
            self._make_room()
            return self.driver.create(self.chunk_bytes)

    def give_back(self, chunks: Sequence[Any]) -> None:
        """Takes chunks that are mapped nowhere; those beyond the limit of idle ones go to the device.

        What the device does not take stays here, to be tried again by `trim`.
        """
        with self._lock:
            num_kept = max(0, min(len(chunks), self._max_idle - len(self._idle)))
            self._idle.extend(chunks[:num_kept])
            self._num_held -= len(chunks)
            self._num_leaving += len(chunks) - num_kept
        self._destroy(list(chunks[num_kept:]))

    def trim(self, keep_bytes: int = 0) -> int:
        """Gives idle chunks back to the device but for so many bytes; returns the bytes given back.

        Raises:
            DeviceError: the device did not take some; these stay idle.
        """
        with self._lock:
            num_kept = min(len(self._idle), keep_bytes // self.chunk_bytes)
            leaving, self._idle = self._idle[num_kept:], self._idle[:num_kept]
            self._num_leaving += len(leaving)
        error = self._destroy(leaving)
        if error is not None:
            raise error
        return len(leaving) * self.chunk_bytes

    def _destroy(self, chunks: list[Any]) -> DeviceError | None:
        """Ends chunks that are counted as leaving; the error of the first that stayed."""
        first_error: DeviceError | None = None
        for chunk in chunks:
            try:
                self.driver.destroy(chunk)
            except DeviceError as exc:
                first_error = first_error or exc
                with self._lock:
                    self._idle.append(chunk)
                    self._num_leaving -= 1
            else:
                with self._lock:
                    self._num_leaving -= 1
        return first_error
