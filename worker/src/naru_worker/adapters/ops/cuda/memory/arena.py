"""An arena over virtual memory: its addresses stay, chunks of the pool come and go behind them.

Captured CUDA graphs hold addresses, so a model that slept can go on with the graphs it had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from naru_worker.adapters.ops.cuda.memory.byte_ranges import ByteRanges
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool
from naru_worker.adapters.ops.cuda.memory.device_arena import HostSpan
from naru_worker.adapters.ops.cuda.memory.errors import DeviceError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class MappedArena:
    """Implements `DeviceArena` with a chunk pool. Not thread-safe; the pool it shares is."""

    reason = ""

    def __init__(self, pool: ChunkPool, num_bytes: int) -> None:
        """Reserves addresses, rounded up to whole chunks; no memory yet.

        Raises:
            ValueError: less than one byte.
            DeviceError: the device refused.
        """
        if num_bytes < 1:
            raise ValueError(f"an arena of {num_bytes!r} bytes; one is the least")
        self._pool = pool
        self._driver = pool.driver
        self._reserved = -(-num_bytes // pool.chunk_bytes) * pool.chunk_bytes
        self.address = self._driver.reserve(self._reserved)
        """Of the first byte, on the device."""
        self._used = ByteRanges()
        self._mapped: dict[int, Any] = {}
        """Chunk index to handle."""
        self._accessible: set[int] = set()
        """Mapped chunks that may be touched; the others were left by a failure."""
        self._surplus: set[int] = set()
        """Mapped chunks that the device once did not let go; some may be in use again."""
        self._kept: list[HostSpan] | None = None
        """Where the content is while it sleeps."""
        self._is_asleep = False
        self._is_closed = False

    @property
    def reserved_bytes(self) -> int:
        """Size of the range."""
        return self._reserved

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory behind them."""
        return len(self._mapped) * self._pool.chunk_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are ensured."""
        return self._used.num_bytes

    @property
    def is_asleep(self) -> bool:
        """Whether nothing may be touched."""
        return self._is_asleep

    def ensure(self, first_byte: int, num_bytes: int) -> None:
        """Maps what is missing; see `DeviceArena.ensure`."""
        stop = self._checked_stop(first_byte, num_bytes)
        if self._is_asleep:
            raise RuntimeError("the arena is asleep")
        if self._used.covers(first_byte, stop):
            return
        self._map(self._chunks_of(first_byte, stop))
        self._used.add(first_byte, stop)

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Unmaps what nobody uses any more; see `DeviceArena.release`."""
        stop = self._checked_stop(first_byte, num_bytes)
        if self._kept is not None:
            raise RuntimeError("the arena is asleep, and its content is kept elsewhere")
        self._used.remove(first_byte, stop)
        size = self._pool.chunk_bytes
        candidates = {*self._chunks_of(first_byte, stop), *self._surplus}
        return self._unmap([i for i in candidates if not self._used.touches(i * size, (i + 1) * size)])

    def sleep(self, spans: Sequence[HostSpan] | None = None) -> int:
        """Unmaps everything; see `DeviceArena.sleep`."""
        self._check_open()
        if self._is_asleep:
            return 0
        if spans is not None:
            room = sum(span.num_bytes for span in spans)
            if room < self.used_bytes:
                raise ValueError(f"{room} bytes of the host cannot hold the {self.used_bytes} that are in use")
            for host, address, num_bytes in self._pieces(spans):
                self._driver.copy_to_host(host, address, num_bytes)
        self._kept = None if spans is None else list(spans)
        self._is_asleep = True
        return self._unmap(self._mapped)

    def wake(self) -> None:
        """Maps all again; see `DeviceArena.wake`."""
        self._check_open()
        if not self._is_asleep:
            return
        self._map(self._chunks_in_use())
        try:
            for host, address, num_bytes in self._pieces(self._kept or ()):
                self._driver.copy_to_device(address, host, num_bytes)
        except DeviceError:
            self._unmap_quietly(self._mapped)
            raise
        self._kept = None
        self._is_asleep = False

    def tensor(self, first_byte: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view on the GPU; see `DeviceArena.tensor`."""
        from naru_worker.adapters.ops.cuda.memory.device_view import tensor_at, tensor_bytes

        self._check_open()
        if not self._used.touches(first_byte, first_byte + 1):
            raise ValueError(f"byte {first_byte} is not in use; ensure it before a tensor begins there")
        self._checked_stop(first_byte, tensor_bytes(shape, dtype))
        return tensor_at(self.address + first_byte, shape, dtype, self._driver.device, owner=self)

    def close(self) -> None:
        """Gives all back; see `DeviceArena.close`."""
        if self._is_closed:
            return
        self._used.remove(0, self._reserved)
        self._kept = None
        self._unmap(self._mapped)
        self._driver.free_range(self.address, self._reserved)
        self._is_closed = True

    def _map(self, wanted: Iterable[int]) -> None:
        """Puts chunks behind those places that have none: all, or none and an error."""
        wanted = list(wanted)
        missing = [index for index in wanted if index not in self._mapped]
        chunks = self._pool.take(len(missing))
        try:
            for index in missing:
                self._driver.map(self._address_of(index), self._pool.chunk_bytes, chunks[-1])
                self._mapped[index] = chunks.pop()
            closed = [index for index in wanted if index not in self._accessible]
            for first, count in _runs(closed):
                self._driver.set_access(self._address_of(first), count * self._pool.chunk_bytes)
            self._accessible.update(closed)
        except BaseException:
            self._pool.give_back(chunks)
            self._unmap_quietly([index for index in missing if index in self._mapped])
            raise

    def _unmap_quietly(self, indices: Iterable[int]) -> None:
        """On the way out with another error: what cannot be undone stays mapped and counted, for `release` to retry."""
        try:
            self._unmap(indices)
        except DeviceError:
            _log.exception("device memory could not be unmapped; it stays with its arena")

    def _unmap(self, indices: Iterable[int]) -> int:
        """Gives chunks back that are mapped; tries all, and raises the first error then. Returns the bytes."""
        freed: list[Any] = []
        first_error: DeviceError | None = None
        for index in sorted(indices):
            if index not in self._mapped:
                continue
            try:
                self._driver.unmap(self._address_of(index), self._pool.chunk_bytes)
            except DeviceError as exc:
                first_error = first_error or exc
                self._surplus.add(index)
                continue
            freed.append(self._mapped.pop(index))
            self._accessible.discard(index)
            self._surplus.discard(index)
        self._pool.give_back(freed)
        if first_error is not None:
            raise first_error
        return len(freed) * self._pool.chunk_bytes

    def _pieces(self, spans: Sequence[HostSpan]) -> Iterator[tuple[int, int, int]]:
        """(host address, device address, bytes) of the copies that fit all used bytes into the spans."""
        rest = [(span.address, span.num_bytes) for span in reversed(spans)]
        for start, stop in self._used if spans else ():
            done = start
            while done < stop:
                host, room = rest.pop()
                num_bytes = min(room, stop - done)
                if num_bytes < room:
                    rest.append((host + num_bytes, room - num_bytes))
                if num_bytes:
                    yield host, self.address + done, num_bytes
                done += num_bytes

    def _chunks_in_use(self) -> Iterator[int]:
        """Places that have used bytes, ascending."""
        last = -1
        for start, stop in self._used:
            for index in self._chunks_of(start, stop):
                if index > last:
                    yield index
                    last = index

    def _chunks_of(self, start: int, stop: int) -> range:
        size = self._pool.chunk_bytes
        return range(start // size, -(-stop // size)) if start < stop else range(0)

    def _address_of(self, index: int) -> int:
        return self.address + index * self._pool.chunk_bytes

    def _checked_stop(self, first_byte: int, num_bytes: int) -> int:
        self._check_open()
        if not 0 <= first_byte <= first_byte + num_bytes <= self._reserved:
            raise ValueError(
                f"bytes [{first_byte}, {first_byte + num_bytes}) lie outside the {self._reserved} of the arena"
            )
        return first_byte + num_bytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the arena is closed")


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers in an ascending sequence."""
    first = count = 0
    for index in indices:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count
