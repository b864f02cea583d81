"""Who leaves for whom: as few as needed, none that works, none that is pinned, and never for the same bytes twice."""

from __future__ import annotations

import random

import pytest

from naru_worker.core.hub.actions import Changed, Drain, Load, RejectHeld, TrimKV
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, BytesReturned, KVChanged, Release, RequestEnded, Tick
from naru_worker.core.hub.model import Footprint, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState

NAMES = tuple("abcdefghi")


def unit(name: str, units: int = 1) -> Footprint:
    """100 bytes a unit."""
    return Footprint(f"weights of {name}", 100 * units - 10, 7, 0, 3)


def make_worker(units: float, **limits: float) -> VirtualWorker:
    """A budget for so many units. Names that begin with 'big' take two, the others one. No guard unless given."""
    config = HubConfig(
        **{  # type: ignore[arg-type]
            "budget_bytes": int(100 * units),
            "high_watermark": 1.0,
            "low_watermark": 1.0,
            "guard_loads": 0.0,
            **limits,
        }
    )
    return VirtualWorker(
        config,
        lambda name: unit(name, 2 if name.startswith("big") else 1),
        chance=random.Random(0),
        luck=Luck(unload_s=2.0),
    )


def bring_up(worker: VirtualWorker, *names: str, residency: Residency | None = None) -> None:
    """One after the other, so that the first is the longest idle."""
    for name in names:
        worker.ask(Ask(name, 1, "spec", residency=residency or Residency()))
        worker.run_until_quiet()
        assert state_of(worker, name) is ModelState.READY
        worker.run(1.0)


def state_of(worker: VirtualWorker, name: str) -> ModelState:
    entry = worker.hub.entry(name)
    assert entry is not None
    return entry.state


def drained(worker: VirtualWorker) -> list[str]:
    return [action.model for _, action in worker.log if isinstance(action, Drain)]


def loads(worker: VirtualWorker, name: str) -> int:
    return sum(isinstance(action, Load) and action.model == name for _, action in worker.log)


def test_one_load_evicts_just_the_longest_idle_of_nine() -> None:
    worker = make_worker(10)
    bring_up(worker, *NAMES)
    worker.ask(Ask("big", 1, "spec"))
    worker.run_until_quiet()
    assert drained(worker) == ["a"]
    assert state_of(worker, "big") is ModelState.READY
    entry = worker.hub.entry("a")
    assert entry is not None and entry.state is ModelState.COLD
    assert "evicted for 'big'" in entry.last_eviction and "100 bytes are missing" in entry.last_eviction


def test_two_loads_at_once_evict_once_each_and_never_overcommit() -> None:
    worker = make_worker(10)
    bring_up(worker, *NAMES)
    worker.ask(Ask("big1", 1, "spec"))
    worker.ask(Ask("big2", 1, "spec"))
    worker.run(1.0)
    assert drained(worker) == ["a", "b", "c"]  # one unit is free, four are needed
    worker.run_until_quiet()
    assert drained(worker) == ["a", "b", "c"]
    assert state_of(worker, "big1") is state_of(worker, "big2") is ModelState.READY
    assert worker.hub.memory.free_bytes == 0


def test_bytes_on_their_way_out_are_not_asked_for_again_by_any_event() -> None:
    worker = make_worker(3)
    bring_up(worker, "a", "b", "c")
    worker.ask(Ask("d", 1, "spec"))
    worker.run(0.3)
    for event in (Tick(), KVChanged({}), RequestEnded("b"), BytesReturned(0), Tick()):
        assert worker.hub.handle(event, worker.now_s) == ()
    worker.run_until_quiet()
    assert drained(worker) == ["a"]


def test_a_model_with_a_running_request_is_never_evicted_for_another() -> None:
    worker = make_worker(1, fair_wait_s=1e6)
    bring_up(worker, "a")
    stream = worker.request("a", duration_s=500.0)
    worker.ask(Ask("b", 1, "spec", Tier.COLD))
    waiting = worker.request("b")
    worker.run(499.0)
    assert drained(worker) == [] and state_of(worker, "a") is ModelState.ACTIVE
    assert any("'a' has 1 requests in flight" in sentence for sentence in worker.hub.explain("b", worker.now_s))
    worker.run_until_quiet()
    assert worker.outcomes == {stream: "served", waiting: "served"}
    assert drained(worker) == ["a"] and worker.log[-1][0] > 500.0


def test_after_the_fair_wait_a_busy_model_is_drained_without_cutting_its_stream() -> None:
    worker = make_worker(1, fair_wait_s=1.0)
    bring_up(worker, "a")
    start_s = worker.now_s
    stream = worker.request("a", duration_s=20.0)
    worker.ask(Ask("b", 1, "spec"))
    worker.run(1.1)
    assert drained(worker) == []
    worker.run(0.2)  # fetched after 0.2 s, then waited for one second
    assert drained(worker) == ["a"]
    late = worker.request("a")
    worker.run(15.0)
    assert late not in worker.outcomes and state_of(worker, "a") is ModelState.DRAINING
    worker.run_until_quiet()
    assert worker.outcomes == {stream: "served", late: "served"}
    order = [action.model for time_s, action in worker.log if isinstance(action, Load) and time_s > start_s]
    assert order == ["b", "a"]  # the drained model returns behind the one it made room for


def test_a_drained_model_with_waiting_requests_does_not_take_the_room_back_from_a_plain_ask() -> None:
    worker = make_worker(1, fair_wait_s=1.0, host_budget_bytes=1000)
    bring_up(worker, "a")
    start_s = worker.now_s
    worker.request("a", duration_s=3.0)
    worker.ask(Ask("b", 1, "spec"))
    worker.run(2.0)
    late = worker.request("a")
    worker.run_until_quiet()
    order = [action.model for time_s, action in worker.log if isinstance(action, Load) and time_s > start_s]
    assert order == ["b", "a"] and worker.outcomes[late] == "served"


def test_a_busy_model_keeps_its_minimum_residency_even_after_the_fair_wait() -> None:
    worker = make_worker(1, fair_wait_s=1.0)
    bring_up(worker, "a", residency=Residency(min_residency_s=30.0))
    entry = worker.hub.entry("a")
    assert entry is not None
    end_s = entry.ready_since_s + 30.0
    worker.request("a", duration_s=100.0)
    worker.ask(Ask("b", 1, "spec"))
    worker.run(end_s - worker.now_s - 0.01)
    assert drained(worker) == []
    worker.run(0.02)
    assert drained(worker) == ["a"]


def test_alternating_demand_on_a_budget_for_one_makes_progress_for_both() -> None:
    worker = make_worker(1, fair_wait_s=1.0, guard_loads=5.0)
    for name in ("a", "b"):
        worker.ask(Ask(name, 1, "spec", Tier.COLD))
    requests = []
    for index in range(400):  # each overlaps the next one of its model: neither is ever idle by itself
        requests.append(worker.request("ab"[index % 2], duration_s=0.5))
        worker.run(0.2)
    worker.run_until_quiet()
    assert {worker.outcomes[number] for number in requests} == {"served"}
    for name in ("a", "b"):
        assert 3 < loads(worker, name) < 30, "batches of requests, not one load for each"


def test_the_guard_keeps_a_model_for_a_multiple_of_its_load_time() -> None:
    worker = make_worker(1, guard_loads=40.0)
    worker.ask(Ask("a", 1, "spec"))
    worker.run(0.5)
    entry = worker.hub.entry("a")
    assert entry is not None and entry.load_s == 0.05
    worker.ask(Ask("b", 1, "spec"))
    worker.run(1.0)
    assert drained(worker) == []
    assert any("minimum residency for another" in sentence for sentence in worker.hub.explain("b", worker.now_s))
    worker.run_until_quiet()
    drains = [time_s for time_s, action in worker.log if isinstance(action, Drain)]
    assert drains == [pytest.approx(entry.ready_since_s + 2.0)] or drains == [pytest.approx(0.25 + 2.0)]


def test_when_only_pinned_models_could_make_room_the_request_is_told_at_once() -> None:
    worker = make_worker(2)
    bring_up(worker, "a", "b", residency=Residency(pinned=True))
    worker.ask(Ask("c", 1, "spec", Tier.COLD))
    number = worker.request("c")
    worker.run(0.3)
    outcome = worker.outcomes[number]
    for part in ("rejected", "needs 100 bytes", "0 of 200 bytes are free", "pinned are ['a', 'b']", "unpin or release"):
        assert part in outcome
    assert state_of(worker, "c") is ModelState.FAILED and drained(worker) == []
    again = worker.request("c")
    assert "pinned are" in worker.outcomes[again], "at once, without another fetch"


@pytest.mark.parametrize("release", [True, False])
def test_an_unpin_or_a_release_lets_the_refused_model_in(release: bool) -> None:
    worker = make_worker(2)
    bring_up(worker, "a", "b", residency=Residency(pinned=True))
    worker.ask(Ask("c", 1, "spec"))
    worker.run_until_quiet()
    assert state_of(worker, "c") is ModelState.FAILED
    if release:
        worker.release(Release("b", 2))
    else:
        worker.ask(Ask("b", 1, "spec"))
    worker.run_until_quiet()
    assert state_of(worker, "c") is ModelState.READY and state_of(worker, "b") is ModelState.COLD
    assert worker.hub.entry("c").error == ""  # type: ignore[union-attr]


def test_a_smaller_load_may_pass_one_that_waits_for_busy_models_but_not_for_ever() -> None:
    worker = make_worker(3, fair_wait_s=1.0)
    bring_up(worker, "a", "b", residency=Residency(min_residency_s=40.0))
    for name in ("a", "b"):
        worker.request(name, duration_s=50.0)
    worker.ask(Ask("big", 1, "spec", for_request=True))
    worker.ask(Ask("c", 1, "spec"))
    worker.run(0.3)
    assert state_of(worker, "c") is ModelState.READY, "one unit was free and big could not use it yet"
    worker.release(Release("c", 2))
    worker.run(4.0)
    worker.ask(Ask("d", 1, "spec"))
    worker.run(10.0)
    assert state_of(worker, "d") is ModelState.FETCHING, "big has waited long enough: what is free is its own"
    worker.run_until_quiet()
    assert state_of(worker, "big") is ModelState.READY


def test_cached_prefixes_go_before_models_and_only_as_much_as_needed() -> None:
    worker = make_worker(4)
    bring_up(worker, "a", "b", "c")
    grow_kv(worker, "a", 30)
    grow_kv(worker, "b", 60)
    worker.ask(Ask("d", 1, "spec"))
    worker.run_until_quiet()
    trims = [action for _, action in worker.log if isinstance(action, TrimKV)]
    assert trims == [TrimKV("a", 30), TrimKV("b", 60)]  # 10 bytes were free, 100 are needed
    assert drained(worker) == [] and state_of(worker, "d") is ModelState.READY


def test_busy_models_give_up_prefixes_after_idle_ones_and_never_their_floor() -> None:
    worker = make_worker(3)
    bring_up(worker, "busy", "idle")
    for name in ("busy", "idle"):
        grow_kv(worker, name, 50)
    worker.request("busy", duration_s=5.0)
    worker.ask(Ask("d", 1, "spec"))
    worker.run(0.3)
    trims = [action for _, action in worker.log if isinstance(action, TrimKV)]
    assert trims == [TrimKV("idle", 50), TrimKV("busy", 50)]
    worker.run_until_quiet()
    assert state_of(worker, "d") is ModelState.READY  # what the running request held, "busy" could not give
    assert worker.hub.memory.kv_bytes >= 7 * len(list(worker.hub.residents()))


def test_a_load_whose_bytes_were_taken_by_growing_caches_makes_room_for_the_rest() -> None:
    worker = make_worker(3)
    worker.luck = Luck()
    bring_up(worker, "a", "b")
    worker.request("b", duration_s=10.0)
    worker.bodies["b"].kv_bytes += 40  # the engine has grown, and has not told yet
    worker.ask(Ask("c", 1, "spec"))
    worker.run_until_quiet()
    reasons = [action.reason for _, action in worker.log if isinstance(action, Changed) and action.model == "c"]
    assert "its bytes could not be booked: 60 were free" in reasons
    assert state_of(worker, "c") is ModelState.READY and drained(worker) == ["a"]
    assert loads(worker, "c") == 2


def test_bytes_that_an_unload_keeps_stay_booked_until_they_are_back() -> None:
    worker = make_worker(2)
    bring_up(worker, "a", "b")
    worker.luck = Luck(keeps_bytes=1.0)
    worker.release(Release("a", 2))
    worker.run(1.0)
    assert worker.hub.memory.unreturned_bytes == 7
    assert any("7 bytes of this worker's memory" in sentence for sentence in worker.hub.explain("b", worker.now_s))
    worker.luck = Luck()
    worker.ask(Ask("big", 1, "spec"))
    worker.run(1.0)
    assert state_of(worker, "big") is ModelState.FAILED, "200 bytes can never come free while 7 are lost"
    worker.run_until_quiet()
    assert worker.hub.memory.unreturned_bytes == 0
    assert state_of(worker, "big") is ModelState.READY


def test_above_the_high_watermark_idle_models_leave_down_to_the_low_one() -> None:
    worker = make_worker(10, high_watermark=0.8, low_watermark=0.5)
    bring_up(worker, *NAMES[:8])
    assert drained(worker) == [], "80 % is not above"
    worker.request("c", duration_s=50.0)
    worker.ask(Ask("i", 1, "spec"))
    worker.run_until_quiet()
    assert drained(worker) == ["a", "b", "d", "e"], "down to 50 %, without the busy one"
    evictions = [action for _, action in worker.log if isinstance(action, Changed) and action.is_eviction]
    assert [(each.old, each.new) for each in evictions] == [(ModelState.DRAINING, ModelState.COLD)] * 4
    assert all("above the high watermark" in each.reason for each in evictions)


def test_the_sweep_trims_first_and_spares_pinned_models_last_copies_and_the_newest() -> None:
    worker = make_worker(10, high_watermark=0.5, low_watermark=0.1)
    bring_up(worker, "pinned", residency=Residency(pinned=True))
    bring_up(worker, "last", residency=Residency(keep_last_copy=True))
    bring_up(worker, "a", "b", "c")
    grow_kv(worker, "b", 40)
    worker.run_until_quiet()
    assert TrimKV("b", 40) in [action for _, action in worker.log]
    assert sorted(drained(worker)) == ["a", "b"]


def test_a_last_copy_leaves_for_a_load_when_nothing_else_can() -> None:
    worker = make_worker(2)
    bring_up(worker, "last", residency=Residency(keep_last_copy=True))
    bring_up(worker, "other")
    worker.ask(Ask("c", 1, "spec"))
    worker.run_until_quiet()
    assert drained(worker) == ["other"]
    worker.ask(Ask("big", 1, "spec"))
    worker.run_until_quiet()
    assert set(drained(worker)) == {"other", "last", "c"}


def test_a_load_may_fill_the_whole_budget() -> None:
    worker = make_worker(2, high_watermark=0.5, low_watermark=0.5)
    bring_up(worker, "big")
    worker.run(100.0)
    assert state_of(worker, "big") is ModelState.READY and worker.hub.memory.free_bytes == 0


def test_models_with_common_weights_pay_once_and_leave_together_when_one_is_not_enough() -> None:
    shared = {name: Footprint("same", 90, 5, 0, 5) for name in ("twin1", "twin2")}
    config = HubConfig(budget_bytes=220, guard_loads=0.0, high_watermark=1.0, low_watermark=1.0)
    worker = VirtualWorker(config, {**shared, "c": unit("c"), "big": unit("big", 2)}, chance=random.Random(0))
    bring_up(worker, "twin1", "twin2")
    assert worker.hub.memory.used_bytes == 110
    assert any("shares its weights with 'twin2'" in sentence for sentence in worker.hub.explain("twin1", 0))
    bring_up(worker, "c")
    assert drained(worker) == []
    worker.ask(Ask("big", 1, "spec"))
    worker.run_until_quiet()
    assert sorted(drained(worker)) == ["c", "twin1", "twin2"] and state_of(worker, "big") is ModelState.READY


def test_weights_that_a_waiting_load_has_in_common_are_not_counted_as_room_for_it() -> None:
    shared = {name: Footprint("same", 90, 5, 0, 5) for name in ("twin1", "twin2")}
    config = HubConfig(budget_bytes=200, guard_loads=0.0, high_watermark=1.0, low_watermark=1.0)
    worker = VirtualWorker(config, {**shared, "c": unit("c")}, chance=random.Random(0))
    bring_up(worker, "twin1", "c", "twin2")
    assert drained(worker) == ["c"] and worker.hub.memory.used_bytes == 110


def test_only_a_concrete_load_rejects_and_only_its_own_requests() -> None:
    worker = make_worker(1)
    bring_up(worker, "a", residency=Residency(pinned=True))
    for name in ("b", "c"):
        worker.ask(Ask(name, 1, "spec", Tier.COLD))
    worker.request("b")
    worker.run_until_quiet()
    assert [action.model for _, action in worker.log if isinstance(action, RejectHeld)] == ["b"]


def grow_kv(worker: VirtualWorker, name: str, num_bytes: int) -> None:
    """The engine's cache has grown, and it tells."""
    body = worker.bodies[name]
    body.kv_bytes += num_bytes
    worker.tell(KVChanged({name: body.kv_bytes}))
