"""Failed loads: who is told, when they are tried again, and that nobody else pays for them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.hub.actions import Drain, Fetch, RejectHeld
from naru_worker.core.hub.backoff import failures_in_row, retry_at_s
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Failed, Fetched, Release, Stopped
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Footprint, ModelEntry, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState

CONFIG = HubConfig(
    budget_bytes=100,
    high_watermark=1.0,
    low_watermark=1.0,
    guard_loads=0.0,
    backoff_first_s=1.0,
    backoff_max_s=8.0,
    backoff_expires_s=100.0,
)


def make_worker(**footprints: Footprint) -> VirtualWorker:
    plain = Footprint("plain", 90, 7, 0, 3)
    return VirtualWorker(
        CONFIG, {"a": plain, "b": Footprint("other", 90, 7, 0, 3), **footprints}, chance=random.Random(0)
    )


def entry_of(worker: VirtualWorker, name: str) -> ModelEntry:
    entry = worker.hub.entry(name)
    assert entry is not None
    return entry


def fetches(worker: VirtualWorker) -> list[float]:
    return [round(time_s, 3) for time_s, action in worker.log if isinstance(action, Fetch)]


def test_a_failure_is_told_with_its_reason_and_further_requests_at_once() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    first = worker.request("a")
    worker.run(0.3)
    assert "failed to load: no such file" in worker.outcomes[first]
    assert entry_of(worker, "a").state is ModelState.FAILED and entry_of(worker, "a").error == "no such file"
    second = worker.request("a")
    assert "no such file" in worker.outcomes[second] and len(fetches(worker)) == 1
    rejections = [action for _, action in worker.log if isinstance(action, RejectHeld)]
    assert [each.retry_s for each in rejections] == [pytest.approx(1.0), pytest.approx(0.9)]
    assert any("not tried again for another 0.9 s" in each for each in worker.hub.explain("a", worker.now_s))


def test_a_model_that_fails_evicts_nobody() -> None:
    worker = make_worker()
    worker.ask(Ask("b", 1, "spec"))
    worker.run_until_quiet()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    for _ in range(50):
        worker.request("a")
        worker.run(0.5)
    worker.run_until_quiet()
    assert entry_of(worker, "b").state is ModelState.READY
    assert not [action for _, action in worker.log if isinstance(action, Drain)]


def test_a_model_that_is_wanted_is_tried_again_with_doubled_pauses() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec"))
    worker.run(30.0)
    # a fetch takes 0.2 s to fail; the pauses are 1, 2, 4, 8 and 8 s
    assert fetches(worker) == [0.0, 1.2, 3.4, 7.6, 15.8, 24.0]
    worker.failing.clear()
    worker.run(10.0)
    entry = entry_of(worker, "a")
    assert entry.state is ModelState.READY and (entry.num_failures, entry.error) == (0, "")


def test_a_model_raised_by_demand_is_tried_again_by_the_next_request_after_its_pause() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    worker.request("a")
    worker.run(5.0)
    assert len(fetches(worker)) == 1, "nobody wants it meanwhile"
    worker.failing.clear()
    number = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served"


def test_a_failure_is_forgotten_after_its_time() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    worker.request("a")
    worker.run(99.0)
    assert entry_of(worker, "a").state is ModelState.FAILED and entry_of(worker, "a").num_failures == 1
    worker.run(2.0)
    assert entry_of(worker, "a").state is ModelState.COLD and entry_of(worker, "a").num_failures == 0


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_permanent_failure_waits_for_a_newer_generation_or_its_expiry(is_newer: bool) -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.luck = Luck(failure_is_permanent=1.0)
    worker.ask(Ask("a", 1, "spec"))
    worker.run(50.0)
    assert len(fetches(worker)) == 1
    number = worker.request("a")
    assert worker.outcomes[number].startswith("rejected")
    (rejection,) = [action for _, action in worker.log if isinstance(action, RejectHeld)]
    assert rejection.retry_s == 0.0
    worker.failing.clear()
    worker.ask(Ask("a", 2 if is_newer else 1, "spec"))
    worker.run(1.0)
    assert (entry_of(worker, "a").state is ModelState.READY) == is_newer
    worker.run(60.0)
    assert entry_of(worker, "a").state is ModelState.READY


def test_asking_again_does_not_shorten_the_pause() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec"))
    worker.run(0.3)
    for _ in range(5):
        worker.ask(Ask("a", 1, "spec"))
        worker.run(0.1)
    assert len(fetches(worker)) == 1


def test_a_release_forgets_the_failure() -> None:
    worker = make_worker()
    worker.failing.add("a")
    worker.ask(Ask("a", 1, "spec"))
    worker.run(0.3)
    worker.release(Release("a", 2))
    assert entry_of(worker, "a").state is ModelState.COLD
    worker.failing.clear()
    worker.ask(Ask("a", 2, "spec"))
    worker.run(0.3)
    assert entry_of(worker, "a").state is ModelState.READY


def test_a_failed_load_gives_back_its_bytes_and_books_what_it_kept() -> None:
    worker = make_worker()
    worker.luck = Luck(load_fails=1.0, keeps_bytes=1.0)
    worker.ask(Ask("a", 1, "spec", Tier.COLD))
    worker.request("a")
    worker.run(0.3)
    memory = worker.hub.memory
    assert (memory.used_bytes, memory.unreturned_bytes, memory.reserved_bytes) == (7, 7, 0)
    assert entry_of(worker, "a").kv_bytes == 0
    worker.run_until_quiet()
    assert worker.hub.memory.used_bytes == 0


def test_a_model_found_too_large_when_fetched_is_refused_for_good_with_the_numbers() -> None:
    worker = make_worker(big=Footprint("big", 90, 7, 10, 3))
    worker.ask(Ask("b", 1, "spec"))
    worker.run_until_quiet()
    worker.ask(Ask("big", 1, "spec", Tier.COLD))
    number = worker.request("big")
    worker.run_until_quiet()
    assert "it needs 110 bytes" in worker.outcomes[number] and "budget is 100 bytes" in worker.outcomes[number]
    assert [action.retry_s for _, action in worker.log if isinstance(action, RejectHeld)] == [0.0]
    assert entry_of(worker, "b").state is ModelState.READY
    worker.release(Release("b", 2))
    worker.run_until_quiet()
    again = worker.request("big")
    assert worker.outcomes[again].startswith("rejected"), "nothing that leaves can help it"


def test_an_operation_that_was_not_told_to_stop_but_stopped_has_failed() -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 1, "spec"), 0.0)
    actions = hub.handle(Stopped("a", 1), 1.0)
    entry = hub.entry("a")
    assert entry is not None and entry.state is ModelState.FAILED and entry.retry_at_s == 2.0
    assert not [action for action in actions if isinstance(action, Fetch)]


@pytest.mark.parametrize("attempt", [0, 2])
def test_results_of_other_attempts_are_void(attempt: int) -> None:
    hub = Hub(CONFIG)
    hub.ask(Ask("a", 1, "spec"), 0.0)
    for event in (
        Fetched("a", attempt, Footprint("ka", 1, 1, 1)),
        Failed("a", attempt, "late"),
        Stopped("a", attempt),
        Failed("unknown", 1, "late"),
    ):
        assert hub.handle(event, 1.0) == ()
    entry = hub.entry("a")
    assert entry is not None and entry.state is ModelState.FETCHING and entry.footprint is None


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.booleans())
def test_pauses_double_up_to_the_cap_and_never_outlast_the_failure(
    num_failures: int, now_s: float, is_permanent: bool
) -> None:
    pause_s = retry_at_s(CONFIG, num_failures, now_s, is_permanent=is_permanent) - now_s
    expected_s = 100.0 if is_permanent else min(2.0 ** min(num_failures - 1, 10), 8.0)
    assert pause_s == pytest.approx(expected_s, abs=1e-6)


def test_failures_count_in_a_row_only_while_they_are_remembered() -> None:
    assert failures_in_row(CONFIG, 4, failed_at_s=10.0, now_s=109.9) == 4
    assert failures_in_row(CONFIG, 4, failed_at_s=10.0, now_s=110.0) == 0
