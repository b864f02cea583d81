"""Order of work on the device: two streams, events between them, and graphs of recorded work.

The runner launches all its work through `Streams`, so that a test can put a device of its own in their place, where
nothing runs before somebody waits for it. What is submitted must not wait for the device itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.faults import told_apart
from naru_worker.adapters.ops.cuda.recording import empty_torch_cache, recording

Work = Callable[[], object]


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether all work before it is done."""

    def synchronize(self) -> None:
        """Waits for that.

        Raises:
            DeviceError: the device has failed, now or before.
        """


class Stream(Protocol):
    """Work in its order."""

    def submit(self, work: Work) -> None:
        """Launches `work`; tensors that it makes belong to this stream.

        Raises:
            DeviceError: the device has failed before.
        """

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Copies bytes to the device. `host` is pinned, and stays as it is until the copy is done."""

    def download(self, device: Tensor, host: Tensor) -> None:
        """Copies bytes from the device. `host` is pinned, and is not read until the copy is done."""

    def record(self) -> Event:
        """The point that the stream is at."""

    def wait(self, event: Event) -> None:
        """Lets what is submitted from now on run after `event`; the host goes on."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Launches it once more, on the stream of computation."""

    def output(self) -> Any:
        """What the work returned: tensors that hold the newest replay's results, until any graph is replayed.

        To be asked by work that runs after that replay.
        """


class Streams(Protocol):
    """One device's. For one thread."""

    @property
    def compute(self) -> Stream:
        """For all work of steps."""

    @property
    def copies(self) -> Stream:
        """For results on their way to the host, beside the next step."""

    @property
    def can_capture(self) -> bool:
        """Whether `capture` can be of use."""

    def capture(self, work: Callable[[], Any]) -> Graph:
        """Records work without running it. Waits for the device. All graphs take turns in one pool of memory.

        Raises:
            RuntimeError: some of the work cannot be recorded.
        """

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned memory, (num_bytes,) uint8."""

    def synchronize(self) -> None:
        """Waits for all streams.

        Raises:
            DeviceError: the device has failed.
        """

    def held_bytes(self) -> int:
        """Device memory that torch holds now, for tensors and graphs."""


def open_streams(device: torch.device) -> Streams:
    """The streams of a GPU; on a CPU, where the interpreter computes, work is done when it is submitted."""
    return TorchStreams(device) if device.type == "cuda" else InlineStreams()


class TorchStreams:
    """Streams, events and graphs of CUDA. Computation stays on torch's current stream, as all else does."""

    can_capture = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: weakref.WeakSet[_TorchGraph] = weakref.WeakSet()
        self.compute: Stream = _TorchStream(torch.cuda.current_stream(device), is_current=True)
        copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copies: Stream = _TorchStream(copies, is_current=False)

    def capture(self, work: Callable[[], Any]) -> Graph:
        """Records work without running it."""
        # torch ends a pool with its last graph, and does not take it for another one.
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Threads that load another model's weights allocate memory meanwhile: only this one's calls are looked at. The
        # outer block: a capture that fails may leave its own stream behind as the current one.
        with (
            recording,
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            output = work()
        captured = _TorchGraph(graph, output, self.compute)
        self._graphs.add(captured)
        return captured

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        """Waits for both streams. Not for the device: that is forbidden while another model's graph is recorded."""
        self.compute.record().synchronize()
        self.copies.record().synchronize()

    def held_bytes(self) -> int:
        """Device memory that torch holds now; what it only kept for later goes back first, as a capture does it."""
        empty_torch_cache()
        return torch.cuda.memory_reserved(self._device)


class _TorchStream:
    def __init__(self, stream: torch.cuda.Stream, *, is_current: bool) -> None:
        self._stream = stream
        self._is_current = is_current
        """It is torch's current one anyway: going there and back takes microseconds, for each piece of work."""

    def submit(self, work: Work) -> None:
        if self._is_current:
            work()
            return
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, host: Tensor, device: Tensor) -> None:
        self.submit(lambda: device.copy_(host, non_blocking=True))

    def download(self, device: Tensor, host: Tensor) -> None:
        self.submit(lambda: host.copy_(device, non_blocking=True))

    def record(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with told_apart("an event", "an event"):
            event.record(self._stream)
        return _TorchEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _TorchEvent)
        self._stream.wait_event(event.event)


class _TorchEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        # What a kernel did wrong shows where somebody waits for it, and in every later call.
        with told_apart("a wait", "the work that was waited for"):
            self.event.synchronize()


class _TorchGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Any, compute: Stream) -> None:
        self._graph = graph
        self._output = output
        self._compute = compute

    def replay(self) -> None:
        self._compute.submit(self._graph.replay)

    def output(self) -> Any:
        return self._output


class InlineStreams:
    """For the interpreter: whatever is submitted is done at once. Captures nothing."""

    can_capture = False

    def __init__(self) -> None:
        self.compute: Stream = _InlineStream()
        self.copies: Stream = _InlineStream()

    def capture(self, work: Callable[[], Any]) -> Graph:
        """Refuses."""
        raise RuntimeError("the interpreter has no graphs")

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        """All is done."""

    def held_bytes(self) -> int:
        """Nobody counts it."""
        return 0


class _InlineStream:
    def submit(self, work: Work) -> None:
        work()

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def download(self, device: Tensor, host: Tensor) -> None:
        host.copy_(device)

    def record(self) -> Event:
        return _Done()

    def wait(self, event: Event) -> None:
        pass


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
