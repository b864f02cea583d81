"""Models that leave something in the engine's memory while they wait in host memory, and weights that get not there."""

from __future__ import annotations

import random

import pytest

from naru_worker.core.hub.actions import DropHost, Fetch, Load
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Release
from naru_worker.core.hub.model import Footprint, ModelEntry, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState


def make_worker(luck: Luck | None = None, budget_bytes: int = 200, **footprints: Footprint) -> VirtualWorker:
    """Models of 100 bytes, 20 of which stay when they sleep."""
    config = HubConfig(
        budget_bytes=budget_bytes, host_budget_bytes=1000, high_watermark=1.0, low_watermark=1.0, guard_loads=0.0
    )

    def unit(name: str) -> Footprint:
        return footprints.get(name, Footprint(name, 70, 5, 0, 25, asleep_bytes=20))

    return VirtualWorker(config, unit, chance=random.Random(0), luck=luck)


def entry_of(worker: VirtualWorker, name: str) -> ModelEntry:
    entry = worker.hub.entry(name)
    assert entry is not None
    return entry


def bring_up(worker: VirtualWorker, name: str, residency: Residency | None = None) -> None:
    generation = getattr(worker.hub.entry(name), "generation", 0) + 1
    worker.ask(Ask(name, generation, "spec", residency=residency or Residency()))
    worker.run_until_quiet()
    worker.run(1.0)


def put_to_sleep(worker: VirtualWorker, name: str) -> None:
    worker.release(Release(name, entry_of(worker, name).generation + 1, 0, Tier.HOST))
    worker.run_until_quiet()
    worker.run(1.0)


def booked(worker: VirtualWorker, name: str) -> list[int]:
    """What its loads booked."""
    return [action.num_bytes for _, action in worker.log if isinstance(action, Load) and action.model == name]


def test_what_a_sleeping_model_has_left_stays_booked_and_is_part_of_its_next_load() -> None:
    worker = make_worker()
    bring_up(worker, "a")
    put_to_sleep(worker, "a")
    memory = worker.hub.memory
    assert (memory.used_bytes, memory.private_bytes, memory.host_bytes) == (20, 20, 70)
    bring_up(worker, "a")
    assert booked(worker, "a") == [100, 80] and worker.hub.memory.used_bytes == 100
    worker.release(Release("a", 9))
    worker.run_until_quiet()
    assert worker.hub.memory.used_bytes == 0


def test_a_model_may_wake_into_a_budget_that_it_fills() -> None:
    worker = make_worker(budget_bytes=100)
    bring_up(worker, "a")
    put_to_sleep(worker, "a")
    bring_up(worker, "a")
    assert entry_of(worker, "a").state is ModelState.READY and booked(worker, "a") == [100, 80]


def test_one_that_was_never_loaded_has_left_nothing() -> None:
    worker = make_worker()
    worker.ask(Ask("a", 1, "spec", Tier.HOST))
    worker.run_until_quiet()
    assert entry_of(worker, "a").state is ModelState.HOST and worker.hub.memory.used_bytes == 0
    bring_up(worker, "a")
    assert booked(worker, "a") == [100]


def test_sleepers_leave_host_memory_when_what_they_have_left_is_needed_and_no_sooner() -> None:
    worker = make_worker(big=Footprint("big", 160, 5, 0, 20))
    for name in ("a", "b"):
        bring_up(worker, name)
        put_to_sleep(worker, name)
    bring_up(worker, "c")
    assert not [action for _, action in worker.log if isinstance(action, DropHost)], "there was room beside them"
    bring_up(worker, "big")
    assert entry_of(worker, "big").state is ModelState.READY, worker.hub.explain("big", worker.now_s)
    dropped = [action.model for _, action in worker.log if isinstance(action, DropHost)]
    assert dropped[:2] == ["a", "b"], "the ones used longest ago first"
    assert "was needed for 'big'" in entry_of(worker, "a").last_eviction


def test_a_pinned_model_that_was_sent_to_sleep_stays() -> None:
    worker = make_worker(big=Footprint("big", 180, 5, 0, 10))
    bring_up(worker, "a", Residency(pinned=True))
    put_to_sleep(worker, "a")
    worker.ask(Ask("big", 1, "spec", Tier.COLD))
    worker.request("big")
    worker.run(5.0)
    assert entry_of(worker, "a").state is ModelState.HOST


def test_weights_that_did_not_get_to_host_memory_are_read_from_their_files_again() -> None:
    worker = make_worker(Luck(not_kept=1.0))
    bring_up(worker, "a")
    put_to_sleep(worker, "a")
    assert entry_of(worker, "a").state is ModelState.COLD
    memory = worker.hub.memory
    assert (memory.used_bytes, memory.host_bytes) == (0, 0)
    assert any("no slot was free" in sentence for sentence in worker.hub.explain("a", worker.now_s))
    bring_up(worker, "a")
    assert sum(isinstance(action, Fetch) for _, action in worker.log) == 2


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_load_that_found_no_room_on_the_device_may_go_from_host_memory_again(is_wanted: bool) -> None:
    worker = make_worker()
    bring_up(worker, "a")
    put_to_sleep(worker, "a")
    worker.luck = Luck(wake_fails=1.0)
    number = worker.request("a")
    worker.run(0.5)
    assert entry_of(worker, "a").state is ModelState.FAILED and "no room on the device" in worker.outcomes[number]
    assert (worker.hub.memory.used_bytes, worker.hub.memory.host_bytes) == (20, 70)
    worker.luck = Luck()
    if is_wanted:
        worker.run(2.0)
        worker.request("a")
        worker.run_until_quiet()
        assert entry_of(worker, "a").state is ModelState.READY
        assert sum(isinstance(action, Fetch) for _, action in worker.log) == 1
    else:
        worker.release(Release("a", 9))
        worker.run_until_quiet()
        assert entry_of(worker, "a").state is ModelState.COLD and worker.hub.memory.used_bytes == 0
