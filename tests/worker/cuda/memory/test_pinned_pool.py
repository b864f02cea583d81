"""Slots of pinned memory: free again when the device has passed an event."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from naru_worker.adapters.ops.cuda.memory.pinned_pool import NoPinnedSlot, PinnedPool


class FakeEvent:
    """The device passes it when told to, or when somebody waits."""

    def __init__(self) -> None:
        self.has_passed = False
        self.num_waits = 0
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.num_waits += 1
        if self.error is not None:
            raise self.error
        self.has_passed = True


def test_slots_are_parts_of_one_buffer_and_none_is_handed_out_twice() -> None:
    buffer = np.zeros(70, np.uint8)
    pool = PinnedPool(buffer, 32)
    first, second = pool.take(2)
    first.array[:] = 1
    second.array[:] = 2
    assert buffer.tolist() == [1] * 32 + [2] * 32 + [0] * 6
    assert (second.address - first.address, first.num_bytes, pool.num_taken) == (32, 32, 2)
    with pytest.raises(NoPinnedSlot, match="2 of 2 are taken"):
        pool.take(timeout_s=0.0)
    pool.give_back(first)
    with pytest.raises(ValueError, match="slot 0 is given back"):
        pool.give_back(first)
    assert pool.take() == [first]
    with pytest.raises(ValueError, match="3 slots are asked for"):
        pool.take(3)
    with pytest.raises(ValueError, match="do not fit"):
        PinnedPool(buffer, 71)


def test_a_slot_is_not_used_again_before_the_device_has_passed_its_event() -> None:
    pool = PinnedPool(np.zeros(3, np.uint8), 1)
    slots, events = pool.take(3), [FakeEvent() for _ in range(3)]
    for slot, event in zip(slots, events, strict=True):
        pool.give_back(slot, event)
    events[1].has_passed = True
    assert pool.take() == [slots[1]]
    assert [event.num_waits for event in events] == [0, 0, 0], "one was free: nobody waits"
    assert pool.take() == [slots[0]]
    assert [event.num_waits for event in events] == [1, 0, 0], "the oldest is waited for"


def test_a_device_that_fails_while_it_is_waited_for_loses_no_slot() -> None:
    pool = PinnedPool(np.zeros(1, np.uint8), 1)
    [slot], event = pool.take(), FakeEvent()
    event.error = RuntimeError("the device is gone")
    pool.give_back(slot, event)
    with pytest.raises(RuntimeError, match="the device is gone"):
        pool.take()
    event.error = None
    assert pool.take() == [slot]


def test_who_waits_for_several_slots_gets_them_when_other_threads_give_theirs_back() -> None:
    pool = PinnedPool(np.zeros(2, np.uint8), 1)
    slots = pool.take(2)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(slot.index for slot in pool.take(2)))
    thread.start()
    pool.give_back(slots[0])
    pool.give_back(slots[1], FakeEvent())
    thread.join()
    assert sorted(got) == [0, 1]
