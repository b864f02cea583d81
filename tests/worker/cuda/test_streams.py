"""The streams of a GPU over stand-ins for torch's: what they ask of CUDA while other threads do so, too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_worker.adapters.ops.cuda.memory.errors import DeviceError  # noqa: E402
from naru_worker.adapters.ops.cuda.recording import empty_torch_cache, recording  # noqa: E402
from naru_worker.adapters.ops.cuda.streams import TorchStreams  # noqa: E402


class Cuda:
    """Takes down what `torch.cuda` is asked for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, object]] = []
        self.current: Any = "default"
        self.capture_error: Exception | None = None
        self.wait_error: Exception | None = None
        cuda = self

        class Event:
            def record(self, stream: object) -> None:
                self.stream = stream
                cuda.calls.append(("record", stream))

            def synchronize(self) -> None:
                cuda.calls.append(("wait for", self.stream))
                if cuda.wait_error is not None:
                    raise cuda.wait_error

        class Graph:
            def replay(self) -> None:
                cuda.calls.append(("replay", cuda.current))

        class Capture:
            """As torch's before 2.12: its stream stays where the end of a capture fails."""

            def __init__(self, graph: Graph, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                cuda.calls.append(("capture into", pool))

            def __enter__(self) -> None:
                self.before, cuda.current = cuda.current, "capture"

            def __exit__(self, *args: object) -> None:
                if cuda.capture_error is not None:
                    raise cuda.capture_error
                cuda.current = self.before

        def forbidden(*args: object) -> None:
            raise AssertionError("the whole device is waited for")

        @contextlib.contextmanager
        def stream(other: object) -> Iterator[None]:
            before = cuda.current
            cuda.current = other
            try:
                yield
            finally:
                cuda.current = before

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "graph", Capture)
        patch.setattr(torch.cuda, "Stream", lambda device: "copies")
        patch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
        handles = iter(range(10))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        patch.setattr(torch.cuda, "synchronize", forbidden)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """In the place of torch's."""
    return Cuda(monkeypatch)


def test_a_model_waits_for_its_streams_and_not_for_the_device(cuda: Cuda) -> None:
    # A thread that closes one model would else break the graph that the engine records of another.
    TorchStreams(torch.device("cpu")).synchronize()
    assert {stream for call, stream in cuda.calls if call == "wait for"} == {"default", "copies"}


def test_a_failed_device_is_told_by_whoever_waits(cuda: Cuda) -> None:
    cuda.wait_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="illegal memory access"):
        TorchStreams(torch.device("cpu")).synchronize()


def test_a_failed_capture_leaves_the_stream_of_computation_current(cuda: Cuda) -> None:
    streams = TorchStreams(torch.device("cpu"))
    cuda.capture_error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError, match="during capture"):
        streams.capture(lambda: None)
    assert cuda.current == "default"


def test_computation_stays_on_the_current_stream_and_copies_have_their_own(cuda: Cuda) -> None:
    streams = TorchStreams(torch.device("cpu"))
    graph = streams.capture(lambda: cuda.current)
    assert graph.output() == "capture"
    graph.replay()
    assert cuda.calls[-1] == ("replay", "default")
    seen: list[object] = []
    streams.copies.submit(lambda: seen.append(cuda.current))
    streams.compute.submit(lambda: seen.append(cuda.current))
    assert seen == ["copies", "default"]


def test_graphs_share_a_pool_that_ends_with_the_last_of_them(cuda: Cuda) -> None:
    streams = TorchStreams(torch.device("cpu"))
    graphs = [streams.capture(lambda: None) for _ in range(2)]
    graphs.append(streams.capture(lambda: None))
    graphs.clear()
    graphs.append(streams.capture(lambda: None))
    assert [pool for call, pool in cuda.calls if call == "capture into"] == [0, 0, 0, 1]


def is_kept_from_others() -> bool:
    """Whether another thread would wait for `recording`."""
    found: list[bool] = []

    def ask() -> None:
        found.append(not recording.acquire(blocking=False))
        if not found[0]:
            recording.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_no_thread_empties_torchs_cache_while_another_one_records(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append(is_kept_from_others()))
    TorchStreams(torch.device("cpu")).capture(lambda: found.append(is_kept_from_others()))
    empty_torch_cache()
    assert (found, is_kept_from_others()) == ([True, True], False)


def test_a_torch_that_gives_nothing_back_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    empty_torch_cache()
