"""Pinned memory for weights that wait: there as it is pinned, and ordinary where the system refuses."""

from __future__ import annotations

import logging
import threading

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from mapped_host import MappedHost  # noqa: E402

from naru_worker.adapters.model_memory import open_sleep_slots as of_backend  # noqa: E402
from naru_worker.adapters.ops.cuda.memory import sleep_slots  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.chunk_pool import ChunkPool  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import NoPinnedSlot  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.sleep_slots import open_sleep_slots  # noqa: E402

SLOT_BYTES = 4096
DEADLINE_S = 20.0


def memory_of(host: MappedHost) -> DeviceMemory:
    return DeviceMemory("cpu", ChunkPool(host, 1 << 20, chunk_bytes=4096), "")


def test_slots_can_be_taken_as_they_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_slots, "_PINNED_AT_ONCE_BYTES", 2 * SLOT_BYTES)
    host, gate, is_first = MappedHost(), threading.Event(), threading.Event()
    pin = host.pin

    def slow(host_address: int, num_bytes: int) -> None:
        assert host.pins == [] or gate.wait(DEADLINE_S)
        is_first.set()
        pin(host_address, num_bytes)

    monkeypatch.setattr(host, "pin", slow)
    pool = open_sleep_slots(memory_of(host), 5 * SLOT_BYTES + 17, SLOT_BYTES)
    assert pool is not None and pool.num_slots == 5
    first = pool.take(2, DEADLINE_S)
    with pytest.raises(NoPinnedSlot):
        pool.take(1, 0.0)
    gate.set()
    rest = pool.take(3, DEADLINE_S)
    assert host.pins == [2 * SLOT_BYTES, 2 * SLOT_BYTES, SLOT_BYTES]
    assert len({slot.address for slot in (*first, *rest)}) == 5
    rest[-1].array[:] = 7


def test_where_pinning_is_refused_ordinary_memory_serves_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    pool = open_sleep_slots(memory_of(MappedHost(pins_refused=True)), 3 * SLOT_BYTES, SLOT_BYTES)
    assert pool is not None
    assert len(pool.take(3, DEADLINE_S)) == 3
    assert "CUDA_ERROR_NOT_PERMITTED" in caplog.text and "ulimit -l" in caplog.text


def test_memory_that_is_not_to_be_had_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    assert open_sleep_slots(memory_of(MappedHost()), 1 << 62, 1 << 55) is None
    assert "no model waits in host memory" in caplog.text


def test_without_a_budget_or_where_nothing_is_mapped_there_are_none() -> None:
    assert open_sleep_slots(memory_of(MappedHost()), SLOT_BYTES - 1, SLOT_BYTES) is None
    assert open_sleep_slots(DeviceMemory("cpu", None, "fixed"), 1 << 20, SLOT_BYTES) is None
    assert of_backend("ref", 1 << 20) is None
