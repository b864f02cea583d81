"""Tiers, demand, idle limits and host memory: where models come to rest, and what brings them up."""

from __future__ import annotations

import random

from naru_worker.core.hub.actions import Changed, Drain, DropHost, Fetch, Load, RaiseToHost, Unload
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Release, RequestArrived, Tick
from naru_worker.core.hub.model import Footprint, ModelEntry, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState


def unit(name: str) -> Footprint:
    """100 bytes, 90 of them weights."""
    return Footprint(f"weights of {name}", 90, 7, 0, 3)


def make_worker(units: int = 10, host_units: int = 0, **limits: float) -> VirtualWorker:
    config = HubConfig(
        **{  # type: ignore[arg-type]
            "budget_bytes": 100 * units,
            "host_budget_bytes": 90 * host_units,
            "high_watermark": 1.0,
            "low_watermark": 1.0,
            "guard_loads": 0.0,
            **limits,
        }
    )
    return VirtualWorker(config, unit, chance=random.Random(0))


def entry_of(worker: VirtualWorker, name: str) -> ModelEntry:
    entry = worker.hub.entry(name)
    assert entry is not None
    return entry


def path(worker: VirtualWorker, name: str) -> list[ModelState]:
    """States it went through."""
    return [action.new for _, action in worker.log if isinstance(action, Changed) and action.model == name]


def count(worker: VirtualWorker, name: str, kind: type) -> int:
    return sum(isinstance(action, kind) and action.model == name for _, action in worker.log)


def settle(worker: VirtualWorker, *asks: Ask) -> None:
    for ask in asks:
        worker.ask(ask)
        worker.run_until_quiet()
        worker.run(1.0)


def test_an_active_model_goes_from_its_files_straight_to_the_engine() -> None:
    worker = make_worker(host_units=10)
    settle(worker, Ask("a", 1, "spec"))
    assert path(worker, "a") == [ModelState.FETCHING, ModelState.LOADING, ModelState.READY]
    assert worker.hub.memory.used_bytes == 100 and worker.hub.memory.host_bytes == 0
    entry = entry_of(worker, "a")
    assert entry.footprint == unit("a") and entry.load_s == 0.05 and entry.kv_bytes == 7


def test_a_model_asked_for_in_host_memory_rests_there_and_loads_from_there() -> None:
    worker = make_worker(host_units=10)
    settle(worker, Ask("a", 1, "spec", Tier.HOST))
    assert path(worker, "a") == [ModelState.FETCHING, ModelState.HOST]
    assert (worker.hub.memory.used_bytes, worker.hub.memory.host_bytes) == (0, 90)
    worker.request("a")
    worker.run(0.1)
    assert path(worker, "a")[2:] == [ModelState.LOADING, ModelState.ACTIVE]
    assert count(worker, "a", Fetch) == 1
    assert (worker.hub.memory.used_bytes, worker.hub.memory.host_bytes) == (100, 0), "active weights cost host nothing"


def test_without_a_host_budget_a_host_model_stays_cold_and_says_why() -> None:
    worker = make_worker(host_units=0)
    settle(worker, Ask("a", 1, "spec", Tier.HOST))
    assert path(worker, "a") == []
    assert any("no budget for that" in sentence for sentence in worker.hub.explain("a", worker.now_s))
    number = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served"


def test_weights_larger_than_the_host_budget_stay_cold_with_the_numbers() -> None:
    worker = make_worker(host_units=1)
    worker.footprint = {"a": Footprint("ka", 95, 1, 0, 0)}.__getitem__
    settle(worker, Ask("a", 1, "spec", Tier.HOST))
    assert entry_of(worker, "a").state is ModelState.COLD
    assert any("95 bytes" in each and "90 bytes" in each for each in worker.hub.explain("a", worker.now_s))


def test_host_memory_keeps_the_last_used_and_those_asked_for_there() -> None:
    worker = make_worker(units=1, host_units=2)
    for name in ("a", "b", "c", "d"):
        settle(worker, Ask(name, 1, "spec"))
    assert [entry_of(worker, name).state for name in "abcd"] == [
        ModelState.COLD,
        ModelState.HOST,
        ModelState.HOST,
        ModelState.READY,
    ]
    assert "host memory was needed for 'c'" in entry_of(worker, "a").last_eviction


def test_models_that_rest_in_host_memory_leave_it_before_those_asked_for_there() -> None:
    worker = make_worker(units=1, host_units=2)
    settle(worker, Ask("asked", 1, "spec", Tier.HOST), Ask("rests", 1, "spec", Tier.COLD))
    worker.request("rests")
    worker.run_until_quiet()
    settle(worker, Ask("c", 1, "spec"))
    assert entry_of(worker, "rests").state is ModelState.HOST
    settle(worker, Ask("e", 1, "spec", Tier.HOST))
    assert [entry_of(worker, name).state for name in ("asked", "rests", "e")] == [
        ModelState.HOST,
        ModelState.COLD,
        ModelState.HOST,
    ]


def test_host_memory_is_not_taken_from_models_that_were_used_later() -> None:
    worker = make_worker(units=2, host_units=1)
    settle(worker, Ask("old", 1, "spec", residency=Residency(priority=1000)), Ask("young", 1, "spec"))
    settle(worker, Ask("c", 1, "spec", residency=Residency(pinned=True)))
    assert entry_of(worker, "young").state is ModelState.HOST
    settle(worker, Ask("d", 1, "spec"))
    assert [entry_of(worker, name).state for name in ("old", "young")] == [ModelState.COLD, ModelState.HOST]


def test_shared_weights_leave_host_memory_with_their_last_loaded_user_when_there_is_no_room() -> None:
    worker = make_worker(host_units=1)
    twins = {name: Footprint("same", 90, 7, 0, 3) for name in ("active", "resting")}
    worker.footprint = {**twins, "other": unit("other")}.__getitem__
    settle(worker, Ask("active", 1, "spec"), Ask("resting", 1, "spec", Tier.HOST))
    settle(worker, Ask("other", 1, "spec", Tier.HOST, residency=Residency(pinned=True)))
    assert worker.hub.memory.host_bytes == 90, "the resting twin costs nothing while the other one is active"
    worker.release(Release("active", 2))
    worker.run_until_quiet()
    assert [entry_of(worker, name).state for name in ("active", "resting", "other")] == [
        ModelState.COLD,
        ModelState.COLD,
        ModelState.HOST,
    ]
    assert (worker.hub.memory.used_bytes, worker.hub.memory.host_bytes) == (0, 90)


def test_a_load_from_host_memory_that_fails_leaves_it() -> None:
    worker = make_worker(host_units=1)
    settle(worker, Ask("a", 1, "spec", Tier.HOST))
    worker.luck = Luck(load_fails=1.0)
    worker.request("a")
    worker.run(0.1)
    assert entry_of(worker, "a").state is ModelState.FAILED
    assert (worker.hub.memory.used_bytes, worker.hub.memory.host_bytes) == (0, 0)


def test_a_pinned_model_stays_in_host_memory() -> None:
    worker = make_worker(host_units=1)
    settle(worker, Ask("a", 1, "spec", Tier.HOST, residency=Residency(pinned=True)), Ask("b", 1, "spec", Tier.HOST))
    assert entry_of(worker, "a").state is ModelState.HOST and entry_of(worker, "b").state is ModelState.COLD
    assert any("no room for it" in each for each in worker.hub.explain("b", worker.now_s))


def test_an_evicted_model_rests_in_host_memory_and_a_request_brings_it_back() -> None:
    worker = make_worker(units=1, host_units=5)
    settle(worker, Ask("a", 1, "spec"), Ask("b", 1, "spec"))
    assert entry_of(worker, "a").state is ModelState.HOST and entry_of(worker, "a").tier is Tier.ACTIVE
    assert any("by the worker's own decision" in each for each in worker.hub.explain("a", worker.now_s))
    number = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served"
    assert entry_of(worker, "a").state is ModelState.READY and entry_of(worker, "b").state is ModelState.HOST


def test_an_eviction_is_told_once_when_it_is_over() -> None:
    worker = make_worker(units=1)
    settle(worker, Ask("a", 1, "spec"), Ask("b", 1, "spec"))
    told = [each for _, each in worker.log if isinstance(each, Changed) and each.model == "a" and each.is_eviction]
    assert [(each.old, each.new) for each in told] == [(ModelState.DRAINING, ModelState.COLD)]
    entry = entry_of(worker, "a")
    assert entry.last_eviction == told[0].reason and entry.last_eviction_s > 0
    assert any("It was last evicted" in each for each in worker.hub.explain("a", worker.now_s))


def test_a_request_for_a_cold_model_raises_it_whatever_its_tier_and_it_stays() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec", Tier.COLD))
    assert path(worker, "a") == [] and count(worker, "a", Fetch) == 0
    number = worker.request("a")
    assert entry_of(worker, "a").num_held == 1
    worker.run(0.3)
    assert (entry_of(worker, "a").num_held, entry_of(worker, "a").num_in_flight) == (0, 1)
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served"
    settle(worker, Ask("a", 1, "spec", Tier.COLD))
    assert entry_of(worker, "a").state is ModelState.READY, "a repeated ask takes nothing down"


def test_fifty_requests_for_a_cold_model_are_one_load() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec", Tier.COLD))
    numbers = [worker.request("a") for _ in range(50)]
    worker.ask(Ask("a", 1, "spec"))
    worker.run_until_quiet()
    assert {worker.outcomes[number] for number in numbers} == {"served"}
    assert count(worker, "a", Fetch) == count(worker, "a", Load) == 1


def test_a_load_goes_on_when_the_client_that_wanted_it_has_left() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec", Tier.COLD))
    for _ in range(4):
        worker.cancel("a", worker.request("a"))
        worker.run(0.06)
    worker.run_until_quiet()
    assert entry_of(worker, "a").state is ModelState.READY and count(worker, "a", Load) == 1


def test_a_lower_ask_takes_an_idle_model_down_and_lets_running_requests_end() -> None:
    worker = make_worker(host_units=5)
    settle(worker, Ask("a", 1, "spec"))
    number = worker.request("a", duration_s=30.0)
    worker.ask(Ask("a", 1, "spec", Tier.HOST))
    assert entry_of(worker, "a").state is ModelState.DRAINING
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served" and entry_of(worker, "a").state is ModelState.HOST
    settle(worker, Ask("a", 1, "spec", Tier.COLD))
    assert entry_of(worker, "a").state is ModelState.COLD and count(worker, "a", DropHost) == 1


def test_a_release_cuts_running_requests_after_its_drain_time_and_not_before() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec"))
    short, long = worker.request("a", 4.0), worker.request("a", 6.0)
    worker.release(Release("a", 2, drain_timeout_s=5.0))
    late = worker.request("a")
    assert worker.outcomes[late].startswith("rejected"), "a forgotten model takes no request"
    worker.run_until_quiet()
    assert (worker.outcomes[short], worker.outcomes[long]) == ("served", "cut")
    assert entry_of(worker, "a").state is ModelState.COLD and not entry_of(worker, "a").is_wanted


def test_a_release_ends_a_drain_that_an_eviction_would_not_have_ended() -> None:
    worker = make_worker(units=1, fair_wait_s=0.0)
    settle(worker, Ask("a", 1, "spec"))
    number = worker.request("a", duration_s=1000.0)
    worker.ask(Ask("b", 1, "spec"))
    worker.run(5.0)
    assert entry_of(worker, "a").state is ModelState.DRAINING
    worker.release(Release("a", 2, tier=Tier.COLD, drain_timeout_s=3.0))
    worker.run(2.9)
    assert number not in worker.outcomes
    worker.run(1.0)
    assert worker.outcomes[number] == "cut"
    assert entry_of(worker, "b").state is ModelState.READY


def test_an_old_drain_time_does_not_cut_requests_of_a_later_life() -> None:
    worker = make_worker(units=1, fair_wait_s=0.0)
    settle(worker, Ask("a", 1, "spec"))
    worker.release(Release("a", 2, tier=Tier.COLD, drain_timeout_s=1.0))
    worker.run_until_quiet()
    number = worker.request("a", duration_s=50.0)
    worker.run(1.0)
    worker.ask(Ask("b", 1, "spec"))
    worker.run_until_quiet()
    assert worker.outcomes[number] == "served"


def test_requests_that_wait_are_refused_when_the_model_is_released() -> None:
    worker = make_worker()
    worker.ask(Ask("a", 1, "spec"))
    number = worker.request("a")
    worker.release(Release("a", 2, tier=Tier.COLD))
    assert worker.outcomes[number].startswith("rejected") and "generation 2 released it" in worker.outcomes[number]
    worker.run_until_quiet()
    assert entry_of(worker, "a").state is ModelState.COLD


def test_another_spec_replaces_the_copy_in_memory_after_its_requests() -> None:
    worker = make_worker(host_units=5)
    settle(worker, Ask("a", 1, "old"))
    number = worker.request("a", duration_s=3.0)
    worker.ask(Ask("a", 2, "new"))
    waiting = worker.request("a")
    worker.run_until_quiet()
    assert worker.outcomes == {number: "served", waiting: "served"}
    entry = entry_of(worker, "a")
    assert entry.loaded_spec == entry.spec == "new" and count(worker, "a", Fetch) == 2
    unloads = [each for _, each in worker.log if isinstance(each, Unload)]
    assert [each.keep_host for each in unloads] == [False], "nobody wants the old copy in host memory"


def test_an_idle_model_leaves_at_its_limit_to_host_memory_if_there_is_room() -> None:
    for host_units, rest in ((1, ModelState.HOST), (0, ModelState.COLD)):
        worker = make_worker(host_units=host_units)
        worker.ask(Ask("a", 1, "spec", residency=Residency(idle_ttl_s=10.0)))
        worker.run(1.0)
        used_s = worker.now_s
        worker.request("a", duration_s=5.0)
        worker.run(14.9)
        assert entry_of(worker, "a").state is ModelState.READY
        worker.run(0.3)
        assert entry_of(worker, "a").state is rest
        (drain_s,) = [time_s for time_s, each in worker.log if isinstance(each, Drain)]
        assert abs(drain_s - (used_s + 15.0)) < 1e-6
        assert "idle limit" in entry_of(worker, "a").last_eviction
        worker.run(1000.0)
        assert entry_of(worker, "a").state is rest, "host memory is left only for others"


def test_pinned_models_and_last_copies_have_no_idle_limit() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec", residency=Residency(pinned=True, idle_ttl_s=1.0)))
    settle(worker, Ask("b", 1, "spec", residency=Residency(keep_last_copy=True, idle_ttl_s=1.0)))
    worker.run(100.0)
    assert worker.hub.next_wake_s(worker.now_s) is None
    assert entry_of(worker, "a").state is entry_of(worker, "b").state is ModelState.READY


def test_loads_with_waiting_requests_come_first_then_those_for_requests_then_by_age() -> None:
    worker = make_worker(max_loads=1, max_fetches=1)
    worker.ask(Ask("first", 1, "spec"))
    for name in ("old", "young"):
        worker.ask(Ask(name, 1, "spec"))
        worker.run(0.01)
    worker.ask(Ask("prefetch", 1, "spec", for_request=True))
    worker.ask(Ask("demand", 1, "spec", Tier.COLD))
    worker.request("demand")
    worker.run_until_quiet()
    fetched = [each.model for _, each in worker.log if isinstance(each, Fetch)]
    assert fetched == ["first", "demand", "prefetch", "old", "young"]
    assert [each.model for _, each in worker.log if isinstance(each, Load)] == fetched


def test_a_plain_ask_is_not_starved_by_a_stream_of_requests() -> None:
    worker = make_worker(units=300, max_loads=1, max_fetches=1)
    worker.ask(Ask("first", 1, "spec"))
    worker.ask(Ask("plain", 1, "spec"))
    for index in range(200):
        worker.ask(Ask(f"m{index}", 1, "spec", Tier.COLD))
        worker.request(f"m{index}")
        worker.request(f"m{index}")
        worker.run(0.4 if index else 0.0)
        if index % 2:
            worker.ask(Ask(f"n{index}", 1, "spec", Tier.COLD))
            worker.request(f"n{index}")
    assert entry_of(worker, "plain").state is ModelState.READY


def test_slots_bound_how_many_loads_and_fetches_are_under_way() -> None:
    worker = make_worker(max_loads=2, max_fetches=3)
    for index in range(9):
        worker.ask(Ask(f"m{index}", 1, "spec"))
    assert sum(entry.is_busy for entry in worker.hub.entries()) == 3
    worker.run(0.21)
    loading = [entry.name for entry in worker.hub.entries() if entry.state is ModelState.LOADING]
    assert len(loading) == 2
    assert any("2 of 2 loads are under way" in each for each in worker.hub.explain("m2", worker.now_s))
    worker.run_until_quiet()
    assert {entry.state for entry in worker.hub.entries()} == {ModelState.READY}


def test_time_may_stand_still_and_a_late_clock_changes_nothing() -> None:
    worker = make_worker()
    settle(worker, Ask("a", 1, "spec"))
    worker.tell(Tick())
    worker.hub.handle(RequestArrived("a"), worker.now_s - 100.0)
    assert entry_of(worker, "a").last_used_s == worker.now_s


def test_a_host_model_is_raised_once_however_often_it_is_asked_for() -> None:
    worker = make_worker(host_units=3)
    for _ in range(3):
        worker.ask(Ask("a", 1, "spec", Tier.HOST))
        worker.run(0.1)
    worker.run_until_quiet()
    worker.ask(Ask("a", 1, "spec", Tier.HOST))
    worker.run_until_quiet()
    assert count(worker, "a", Fetch) == count(worker, "a", RaiseToHost) == 1
