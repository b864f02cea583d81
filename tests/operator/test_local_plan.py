"""The plan: what it does in single cases, and what holds after any sequence of changes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_world import ON_DEMAND, POOL, World, desired, model, pool

from naru_operator.core.desired import DesiredState, Residency
from naru_operator.core.local_plan import (
    ObservedWorker,
    Snapshot,
    place,
    plan,
)
from naru_operator.core.model_plan import EVICTED, KNOWN, ObservedModel
from naru_proto.registry import ModelRecord


def test_from_nothing_it_registers_starts_then_loads() -> None:
    world = World()
    first = world.step(desired(model("a")))
    assert [record.name for record in first.put_records] == ["a"]
    assert [start.worker_id for start in first.start_workers] == ["p-0"]
    assert first.load_models == ()
    second = world.step(desired(model("a")))
    assert [(load.worker_id, load.model, load.generation) for load in second.load_models] == [("p-0", "a", 1)]
    assert (second.put_records, second.start_workers) == ((), ())
    assert second.reasons == ("load 'a' in generation 1 on 'p-0': it does not hold it",)
    assert world.step(desired(model("a"))).is_empty


def test_a_worker_without_a_lease_gets_no_command() -> None:
    snapshot = Snapshot(desired(model("a")), (ObservedWorker("p-0", POOL, False, {}),), {}, {})
    assert plan(snapshot, now_s=0).load_models == ()


def test_a_changed_model_is_loaded_in_a_higher_generation() -> None:
    world = World()
    world.settle(desired(model("a")))
    steps = world.step(desired(model("a", uri="pypi://y")))
    assert [(record.generation, record.uri) for record in steps.put_records] == [(2, "pypi://y")]
    assert [(load.generation, load.uri) for load in steps.load_models] == [(2, "pypi://y")]
    assert steps.unload_models == ()


def test_a_record_keeps_the_time_of_its_first_appearance() -> None:
    world = World()
    world.settle(desired(model("a")))
    snapshot = world.snapshot(desired(model("a", uri="pypi://y")))
    assert plan(snapshot, now_s=99).put_records[0].created_s == 7


def test_a_model_that_is_gone_is_forgotten_and_unloaded() -> None:
    world = World()
    world.settle(desired(model("a"), model("b")))
    steps = world.step(desired(model("b")))
    assert steps.delete_records == ("a",)
    assert [(unload.worker_id, unload.model) for unload in steps.unload_models] == [("p-0", "a")]


def test_a_model_that_comes_back_has_a_generation_its_worker_takes() -> None:
    world = World()
    world.settle(desired(model("a"), model("b")))
    world.settle(desired(model("b")))
    world.settle(desired(model("a"), model("b")))
    assert world.records["a"].generation == 3


def test_a_failed_load_is_not_tried_again_until_the_manifest_changes() -> None:
    world = World()
    world.settle(desired(model("a")))
    world.workers["p-0"][1]["a"] = ObservedModel("failed", 1)
    assert world.step(desired(model("a"))).is_empty
    assert len(world.step(desired(model("a", uri="pypi://y"))).load_models) == 1


def test_a_restarted_worker_is_loaded_again() -> None:
    world = World()
    world.settle(desired(model("a")))
    world.workers["p-0"][1].clear()
    assert [load.model for load in world.step(desired(model("a"))).load_models] == ["a"]


def test_a_draining_copy_is_left_alone_until_it_is_gone() -> None:
    world = World()
    world.settle(desired(model("a")))
    world.workers["p-0"][1]["a"] = ObservedModel("draining", 1)
    assert world.step(desired(model("a"))).is_empty
    world.workers["p-0"][1]["a"] = ObservedModel("cold", 1)
    assert len(world.step(desired(model("a"))).load_models) == 1


def test_an_emptied_registry_is_written_again_in_the_same_generation() -> None:
    world = World()
    world.settle(desired(model("a")))
    before = dict(world.records)
    world.records.clear()
    world.settle(desired(model("a")))
    assert {name: record.generation for name, record in world.records.items()} == {"a": before["a"].generation}


def test_a_registry_of_an_earlier_run_is_taken_over_above_its_generation() -> None:
    world = World(records={"a": ModelRecord("a", "pypi://old", 41, created_s=3), "z": ModelRecord("z", "pypi://z", 5)})
    world.settle(desired(model("a")))
    assert set(world.records) == {"a"}
    assert (world.records["a"].generation, world.records["a"].created_s) == (42, 3)


def test_a_model_on_demand_is_made_known_once_to_every_worker_of_its_pools() -> None:
    pools = (pool(2), pool(1, "q"))
    state = desired(model("a", residency=ON_DEMAND), pools=pools)
    world = World()
    world.step(state)
    steps = world.step(state)
    assert [(load.worker_id, load.residency) for load in steps.load_models] == [("p-0", ON_DEMAND), ("p-1", ON_DEMAND)]
    assert steps.reasons[0] == "make known 'a' in generation 1 on 'p-0': it does not know it"
    assert world.step(state).is_empty
    assert (world.records["a"].on_demand, world.records["a"].pools) == (True, ("p",))


def test_a_new_life_of_a_worker_is_told_again() -> None:
    state = desired(model("a", residency=ON_DEMAND))
    world = World()
    world.settle(state)
    world.workers["p-0"][1].clear()
    assert [load.model for load in world.step(state).load_models] == ["a"]


def test_models_on_demand_take_no_place_from_others() -> None:
    many = [model(f"d{index}", residency=ON_DEMAND, pools=("p",)) for index in range(9)]
    world = World()
    world.settle(desired(*many, pools=(pool(1), pool(1, "q"))))
    both = ("p", "q")
    world.settle(desired(*many, model("a", pools=both), model("b", pools=both), pools=(pool(1), pool(1, "q"))))
    assert world.workers["p-0"][1]["a"].state == world.workers["q-0"][1]["b"].state == "ready"


@pytest.mark.parametrize("now", [EVICTED, "host", "loading", "failed", "draining"])
def test_what_a_worker_decided_about_a_loaded_model_stands(now: str) -> None:
    world = World()
    world.settle(desired(model("a")))
    world.move("p-0", "a", now)
    assert world.step(desired(model("a"))).is_empty


def test_a_changed_model_that_was_evicted_is_loaded() -> None:
    world = World()
    world.settle(desired(model("a")))
    world.move("p-0", "a", EVICTED)
    steps = world.step(desired(model("a", uri="pypi://y")))
    assert steps.reasons[-1] == "load 'a' in generation 2 on 'p-0': it knows generation 1"


def test_another_policy_is_told_in_a_new_generation() -> None:
    world = World()
    world.settle(desired(model("a", residency=ON_DEMAND)))
    pinned = Residency(pinned=True)
    steps = world.step(desired(model("a", residency=pinned)))
    assert [(load.generation, load.residency) for load in steps.load_models] == [(2, pinned)]
    assert world.records["a"].on_demand is False


def test_a_known_model_that_no_manifest_names_is_unloaded() -> None:
    world = World()
    world.settle(desired(model("a", residency=ON_DEMAND), model("b")))
    steps = world.step(desired(model("b")))
    assert [(unload.worker_id, unload.model) for unload in steps.unload_models] == [("p-0", "a")]
    assert world.step(desired(model("b"))).is_empty


def test_after_a_stale_command_the_next_one_is_newer_than_what_the_worker_saw() -> None:
    world = World()
    world.settle(desired(model("a"), model("b")))
    world.workers["p-0"][1]["a"] = ObservedModel("failed", 1)
    world.refused["a"] = 7
    steps = world.step(desired(model("a"), model("b")))
    assert [(load.model, load.generation) for load in steps.load_models] == [("a", 8)]
    assert world.records["a"].generation == 8
    assert world.step(desired(model("a"), model("b"))).is_empty


def test_an_unload_that_was_stale_goes_out_in_the_generation_the_worker_saw() -> None:
    world = World()
    world.settle(desired(model("a"), model("b")))
    world.refused["a"] = 7
    assert [unload.generation for unload in world.step(desired(model("b"))).unload_models] == [7]


def test_workers_beyond_the_pool_are_stopped() -> None:
    world = World()
    world.settle(desired(model("a"), pools=(pool(2),)))
    steps = world.step(desired(model("a"), pools=(pool(1),)))
    assert steps.stop_workers == ("p-1",)


def test_workers_with_other_settings_are_replaced_one_at_a_time() -> None:
    world = World()
    world.settle(desired(model("a", min_replicas=2), pools=(pool(2, num_threads=1),)))
    state = desired(model("a", min_replicas=2), pools=(pool(2, num_threads=2),))
    assert world.step(state).stop_workers == ("p-0",)
    assert world.step(state).stop_workers == ()
    world.settle(state)
    assert [pool.num_threads for pool, _ in world.workers.values()] == [2, 2]


@st.composite
def states(draw: st.DrawFn) -> DesiredState:
    pools = tuple(
        pool(draw(st.integers(1, 3)), name, draw(st.sampled_from([None, 1])))
        for name in draw(st.sampled_from(["p", "pq"]))
    )
    names = draw(st.sets(st.sampled_from("abcde"), max_size=4))
    eligible = st.sets(st.sampled_from([p.name for p in pools]), min_size=1)
    models = [
        model(
            name,
            draw(st.sampled_from(["pypi://x", "pypi://y"])),
            draw(st.integers(0, 4)),
            tuple(sorted(draw(eligible))),
            draw(st.sampled_from([Residency(), Residency(pinned=True), ON_DEMAND])),
            draw(st.sampled_from([None, 0])),
        )
        for name in sorted(names)
    ]
    return desired(*models, pools=pools)


MOVES = st.sampled_from([EVICTED, "host", "ready", "failed"])
"""What workers may make of their models unasked."""


@given(st.lists(states(), min_size=1, max_size=5), st.data())
def test_after_any_sequence_of_changes_it_rests_where_it_should(
    sequence: list[DesiredState], data: st.DataObject
) -> None:
    world = World()
    for state in sequence:
        world.settle(state)
        for worker_id, (_, models) in world.workers.items():
            for name, before in models.items():
                now = data.draw(MOVES)
                # What was only made known cannot be evicted.
                world.move(worker_id, name, KNOWN if now == EVICTED and before.state == KNOWN else now)
        assert world.step(state).is_empty
        members = {pool.name: pool.worker_ids() for pool in state.pools}
        assert set(world.workers) == {worker_id for ids in members.values() for worker_id in ids}
        assert set(world.records) == {m.name for m in state.models}
        for m in state.models:
            eligible = {worker_id for name in m.pools for worker_id in members[name]}
            holders = {w for w, (_, models) in world.workers.items() if m.name in models}
            assert holders <= eligible
            num_copies, may_grow = max(1, m.min_replicas), m.scaling.max_replicas != max(1, m.min_replicas)
            assert len(holders) == (len(eligible) if m.is_on_demand or may_grow else min(num_copies, len(eligible)))
        held = {name for _, models in world.workers.values() for name in models}
        assert held == set(world.records)


@given(states(), st.randoms(use_true_random=False))
def test_the_order_of_workers_and_models_does_not_matter(state: DesiredState, random: object) -> None:
    world = World()
    world.settle(state)
    snapshot = world.snapshot(state)
    turned = Snapshot(
        DesiredState(state.models, tuple(reversed(state.pools))),
        tuple(reversed(snapshot.workers)),
        dict(reversed(list(snapshot.records.items()))),
        dict(reversed(list(snapshot.applied.items()))),
    )
    assert place(turned) == place(snapshot)
    assert plan(turned, now_s=7).is_empty


@given(
    st.sampled_from(["num_threads", "memory_budget_bytes", "host_budget_bytes", "watermarks"]),
    st.sampled_from(["num_workers", "drain_timeout_s"]),
)
def test_a_worker_is_replaced_for_what_its_process_was_started_with_alone(started_with: str, told_later: str) -> None:
    changes: dict[str, object] = {"num_threads": 3, "memory_budget_bytes": 7, "host_budget_bytes": 7, "num_workers": 1}
    changes |= {"watermarks": (0.1, 0.2), "drain_timeout_s": 1.0}
    world = World()
    world.settle(desired(model("a")))
    other = dataclasses.replace(POOL, **{told_later: changes[told_later]})  # type: ignore[arg-type]
    assert world.step(desired(model("a"), pools=(other,))).is_empty
    new = dataclasses.replace(POOL, **{started_with: changes[started_with]})  # type: ignore[arg-type]
    assert world.step(desired(model("a"), pools=(new,))).stop_workers == ("p-0",)
