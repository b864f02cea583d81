"""Streams of a device that is never in a hurry: nothing runs before somebody waits, and then in any order allowed.

What a real device would get wrong now and then shows here at once: a host buffer that is written to before its copy
has run (`StreamMisuse`), results that are read too early (`POISON`), work without an event between two streams.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.memory.errors import DeviceError
from naru_worker.adapters.ops.cuda.streams import Event

POISON = 0xA5
"""Each byte of a host buffer whose download has not run."""


class StreamMisuse(AssertionError):
    """What a real device would punish with wrong numbers."""


class FakeEvent:
    """A point in a stream."""

    def __init__(self, device: FakeStreams) -> None:
        self._device = device
        self.is_done = False

    def query(self) -> bool:
        self._device.check_alive()
        return self.is_done

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.is_done)


class FakeStream:
    """A queue of work."""

    def __init__(self, device: FakeStreams) -> None:
        self._device = device
        self.queue: deque[tuple[FakeEvent | None, Callable[[], object]]] = deque()
        """(what has to be done before, what to do)."""

    def submit(self, work: Callable[[], object]) -> None:
        self._push(None, work)

    def upload(self, host: Tensor, device: Tensor) -> None:
        expected = host.clone()

        def work() -> None:
            if not torch.equal(host, expected):
                raise StreamMisuse("a host buffer was written to before its upload had run")
            device.copy_(host)

        self._push(None, work)

    def download(self, device: Tensor, host: Tensor) -> None:
        host.view(torch.uint8).fill_(POISON)
        self._push(None, lambda: host.copy_(device))

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self._push(None, lambda: setattr(event, "is_done", True))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self._push(event, lambda: None)

    @property
    def can_run(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].is_done)

    def _push(self, event: FakeEvent | None, work: Callable[[], object]) -> None:
        self._device.check_alive()
        self.queue.append((event, work))
        self._device.drift()


class FakeGraph:
    """Work that was recorded, to be run over the same tensors."""

    def __init__(self, device: FakeStreams, work: Callable[[], Any]) -> None:
        self._device = device
        self._work = work
        self._is_newest = False
        self._output: Any = None

    def replay(self) -> None:
        self._device.num_replays += 1
        self._device.compute.submit(self._run)

    def output(self) -> Any:
        if self._device.newest_graph is not self:
            raise StreamMisuse("results of a graph are read after another one has run in the same memory")
        return self._output

    def _run(self) -> None:
        self._output = self._work()
        self._device.newest_graph = self


class FakeStreams:
    """`Streams` for tests. `drift_odds`: how likely the device gets on a little whenever something is submitted."""

    can_capture = True

    def __init__(self, seed: int = 0, drift_odds: float = 0.2) -> None:
        self.compute = FakeStream(self)
        self.copies = FakeStream(self)
        self.newest_graph: FakeGraph | None = None
        self.num_captures = 0
        self.num_replays = 0
        self.num_run = 0
        self.capture_error: Exception | None = None
        """What the next captures raise."""
        self.bytes_per_graph = 1000
        self.dies_after: int | None = None
        """So many pieces of work run; then the device fails for good."""
        self._random = random.Random(seed)
        self._drift_odds = drift_odds
        self._is_dead = False

    def capture(self, work: Callable[[], Any]) -> FakeGraph:
        self.synchronize()
        if self.capture_error is not None:
            raise self.capture_error
        self.num_captures += 1
        return FakeGraph(self, work)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.run_until(lambda: not self.compute.queue and not self.copies.queue)

    def held_bytes(self) -> int:
        return self.num_captures * self.bytes_per_graph

    @property
    def is_idle(self) -> bool:
        return not self.compute.queue and not self.copies.queue

    def check_alive(self) -> None:
        if self._is_dead:
            raise DeviceError("event", "CUDA_ERROR_ECC_UNCORRECTABLE")

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Runs work of any stream that may run, one by one."""
        while not is_reached():
            self.check_alive()
            self._run_one()
        self.check_alive()

    def drift(self) -> None:
        while not self._is_dead and not self.is_idle and self._random.random() < self._drift_odds:
            self._run_one()

    def _run_one(self) -> None:
        ready = [stream for stream in (self.compute, self.copies) if stream.can_run]
        if not ready:
            raise StreamMisuse("streams wait for one another, or for an event that is never recorded")
        _, work = self._random.choice(ready).queue.popleft()
        if self.dies_after is not None and self.num_run >= self.dies_after:
            self._is_dead = True
            return
        self.num_run += 1
        with torch.inference_mode():
            work()
