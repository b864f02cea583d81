"""A request, an ask or a release at every moment of a model's way up and down.

Each command is played at each of many moments; the end state is the last one asked for, and every request is served or
told why not.
"""

from __future__ import annotations

import random

import pytest

from naru_worker.core.hub.actions import Changed, Fetch, Load, Stop
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Release
from naru_worker.core.hub.model import Footprint, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState

MOMENTS = tuple(index * 0.1 for index in range(16))
"""Fetch 0 to 0.4 s, load to 0.8 s; a release at 1.0 s, drained at once, unloaded at 1.4 s."""
LUCK = Luck(fetch_s=0.4, load_s=0.4, unload_s=0.4, request_s=0.25)


def make_worker(host_bytes: int = 0, stop_is_late: float = 0.0) -> VirtualWorker:
    config = HubConfig(budget_bytes=100, host_budget_bytes=host_bytes, high_watermark=1.0, low_watermark=1.0)
    luck = Luck(LUCK.fetch_s, LUCK.load_s, LUCK.unload_s, LUCK.request_s, stop_is_late=stop_is_late)
    return VirtualWorker(config, {"a": Footprint("ka", 90, 7, 0, 3)}, chance=random.Random(0), luck=luck)


def state(worker: VirtualWorker) -> ModelState:
    entry = worker.hub.entry("a")
    assert entry is not None
    return entry.state


def count(worker: VirtualWorker, kind: type) -> int:
    return sum(isinstance(action, kind) for _, action in worker.log)


def up_and_down(worker: VirtualWorker, until_s: float, tier: Tier | None = Tier.COLD) -> None:
    """Asked for at 0 s, released at 1.0 s."""
    worker.ask(Ask("a", 1, "spec"))
    worker.run(min(until_s, 1.0))
    if until_s >= 1.0:
        worker.release(Release("a", 2, tier=tier, drain_timeout_s=10.0))
        worker.run(until_s - 1.0)


@pytest.mark.parametrize("host_bytes", [0, 100])
@pytest.mark.parametrize("moment_s", MOMENTS)
def test_a_request_at_any_moment_is_served_by_one_load_at_a_time(moment_s: float, host_bytes: int) -> None:
    worker = make_worker(host_bytes)
    up_and_down(worker, moment_s)
    number = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served" and state(worker) is ModelState.READY
    assert count(worker, Load) == (1 if moment_s < 1.0 else 2)


@pytest.mark.parametrize("stop_is_late", [0.0, 1.0])
@pytest.mark.parametrize("tier", [None, Tier.COLD, Tier.HOST])
@pytest.mark.parametrize("moment_s", [moment for moment in MOMENTS if moment < 1.0])
def test_a_release_at_any_moment_of_a_load_wins(moment_s: float, tier: Tier | None, stop_is_late: float) -> None:
    worker = make_worker(100, stop_is_late)
    up_and_down(worker, moment_s)
    worker.release(Release("a", 2, tier=tier))
    worker.run_until_quiet()
    assert state(worker) is (ModelState.HOST if tier is Tier.HOST else ModelState.COLD)
    assert worker.hub.memory.used_bytes == 0
    assert count(worker, Stop) <= 1
    worker.release(Release("a", 2, tier=tier))
    worker.run_until_quiet()
    assert state(worker) is (ModelState.HOST if tier is Tier.HOST else ModelState.COLD), "twice is once"


@pytest.mark.parametrize("stop_is_late", [0.0, 1.0])
@pytest.mark.parametrize("tier", [None, Tier.COLD, Tier.HOST])
@pytest.mark.parametrize("moment_s", MOMENTS)
def test_an_ask_at_any_moment_of_the_way_down_wins(moment_s: float, tier: Tier | None, stop_is_late: float) -> None:
    worker = make_worker(100, stop_is_late)
    worker.ask(Ask("a", 1, "spec"))
    worker.run(moment_s)
    worker.release(Release("a", 2, tier=tier))
    worker.run(moment_s / 3)
    worker.ask(Ask("a", 3, "spec"))
    number = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served" and state(worker) is ModelState.READY
    assert worker.hub.memory.used_bytes == 100


@pytest.mark.parametrize("moment_s", MOMENTS)
def test_an_ask_for_other_files_at_any_moment_wins(moment_s: float) -> None:
    worker = make_worker(100)
    up_and_down(worker, moment_s, None)
    worker.ask(Ask("a", 3, "other"))
    number = worker.request("a")
    worker.run_until_quiet()
    entry = worker.hub.entry("a")
    assert entry is not None and entry.loaded_spec == "other" and worker.outcomes[number] == "served"


def test_a_load_asked_for_twice_is_done_once() -> None:
    worker = make_worker()
    for _ in MOMENTS:
        worker.ask(Ask("a", 1, "spec"))
        worker.run(0.1)
    worker.run_until_quiet()
    assert count(worker, Fetch) == count(worker, Load) == 1


def test_a_load_that_was_faster_than_its_stop_is_kept_when_it_is_wanted_again() -> None:
    worker = make_worker(stop_is_late=1.0)
    worker.ask(Ask("a", 1, "spec"))
    worker.run(0.5)
    worker.release(Release("a", 2))
    worker.ask(Ask("a", 2, "spec"))
    worker.run_until_quiet()
    assert count(worker, Stop) == count(worker, Load) == 1 and state(worker) is ModelState.READY


def test_every_change_is_told_with_a_reason_and_joins_the_one_before() -> None:
    worker = make_worker(100)
    up_and_down(worker, 2.0, None)
    worker.run_until_quiet()
    changes = [action for _, action in worker.log if isinstance(action, Changed)]
    assert [change.new for change in changes] == [
        ModelState.FETCHING,
        ModelState.LOADING,
        ModelState.READY,
        ModelState.DRAINING,
        ModelState.COLD,
    ]
    assert [change.old for change in changes[1:]] == [change.new for change in changes[:-1]]
    assert all(change.reason for change in changes) and not any(change.is_eviction for change in changes)
