"""Placements: each rule by hand, and all of them in small on real hubs."""

from __future__ import annotations

import functools

from bench.fleet_sim.placement.choosers import (
    Instance,
    ModelClaim,
    PlacementKind,
    PodPerModel,
    shortlist,
    slot_of,
)
from bench.fleet_sim.placement.comparison import (
    PLACEMENTS,
    PlacedFleet,
    PlacementFigures,
    compare_placements,
)
from bench.sim.catalog import GB, NO_WISHES, ModelProfile
from bench.sim.clock import Simulation
from bench.sim.requests import Outcome
from bench.sim.worker import WorkerSetup
from bench.sim.workload import Arrival, Demand

from naru_proto.placement import HeldState, Near
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.model import Footprint

DEMAND = Demand(num_requests=400, rate_per_s=4.0, mean_duration_s=2.0, max_wait_s=60.0)


@functools.cache
def figures() -> dict[str, PlacementFigures]:
    return {row.name: row for row in compare_placements(3, demand=DEMAND, num_models=100)}


def instances(*values: tuple[int, int, float]) -> list[Instance]:
    return [Instance(index, *each) for index, each in enumerate(values)]


def names(found: list[Instance]) -> list[int]:
    return [each.index for each in found]


def test_modelmesh_takes_roomy_workers_near_the_best_before_full_ones() -> None:
    # Best is 40 free with 4 models: near are those with at least 10 free and at most nine models.
    found = shortlist(instances((40, 4, 0.0), (10, 9, 0.0), (9, 1, 0.0), (12, 10, 0.0), (2, 0, 0.0)), 5, 100.0)
    assert names(found) == [0, 1]
    # With ten models on the best one, 1.25 x 10 = 12 are near.
    assert names(shortlist(instances((40, 10, 0.0), (40, 12, 0.0), (40, 13, 0.0)), 5, 100.0)) == [0, 1]


def test_modelmesh_takes_full_workers_by_their_longest_unused_model() -> None:
    # All full at 1000 s; the best was last used at 0 s: within 45 s, or a tenth of its age, which is 100 s.
    assert names(shortlist(instances((1, 1, 0.0), (1, 1, 100.0), (1, 1, 101.0)), 5, 1000.0)) == [0, 1]
    assert names(shortlist(instances((1, 1, 0.0), (1, 1, 45.0), (1, 1, 46.0)), 5, 100.0)) == [0, 1]


def profile(name: str, weight_bytes: int) -> ModelProfile:
    return ModelProfile(name, Footprint(name, weight_bytes, 0, 0), residency=NO_WISHES)


def fleet_of(kind: PlacementKind, *catalog: ModelProfile, num_workers: int = 2) -> PlacedFleet:
    fleet = PlacedFleet(Simulation(0), [WorkerSetup(HubConfig(10 * GB, 20 * GB))] * num_workers, kind)
    fleet.deploy(catalog)
    return fleet


def test_a_model_that_is_up_is_asked_where_it_is_and_loaded_once() -> None:
    fleet = fleet_of(PLACEMENTS[0], profile("a", GB), profile("b", GB))
    catalog = [profile("a", GB), profile("b", GB)]
    fleet.send([Arrival(float(index) / 10, index % 2, 5.0, 60.0) for index in range(20)], catalog)
    fleet.sim.run()
    assert {request.outcome for request in fleet.requests} == {Outcome.SERVED}
    assert sum(worker.operations.num_loads for worker in fleet.workers) == 2


def test_a_lease_shows_what_is_held_and_what_is_near() -> None:
    fleet = fleet_of(PLACEMENTS[0], profile("a", GB), profile("b", GB))
    fleet.send([Arrival(0.0, 0, 30.0, 60.0)], [profile("a", GB)])
    fleet.sim.run(10.0)
    holders = [worker for worker in fleet.workers if worker.operations.num_loads]
    (holder,) = holders
    slot = slot_of(holder, "b")
    assert slot.holding["a"].state is HeldState.READY
    assert (slot.holding["a"].num_in_flight, slot.holding["a"].num_bytes) == (1, GB)
    assert (slot.used_bytes, slot.free_bytes) == (GB, 9 * GB)
    assert slot.near == {"b": Near.DISK}


def test_a_model_claim_is_bound_once_and_spreads_by_free_memory() -> None:
    fleet = fleet_of(PlacementKind("claim", ModelClaim), profile("a", GB), profile("b", GB), profile("c", GB))
    claim = ModelClaim(fleet.workers)
    assert [claim.choose(profile(name, GB), 0.0) for name in ("a", "b", "c", "a")] == [0, 1, 0, 0]


def test_a_pod_for_each_model_takes_a_free_accelerator() -> None:
    fleet = fleet_of(PlacementKind("pods", PodPerModel), profile("a", GB), profile("b", GB))
    fleet.send([Arrival(0.0, 0, 30.0, 60.0)], [profile("a", GB)])
    fleet.sim.run(10.0)
    assert PodPerModel(fleet.workers).choose(profile("b", GB), 10.0) == 1


def test_every_placement_serves_the_same_requests_and_one_model_a_worker_starves_most() -> None:
    assert list(figures()) == [kind.name for kind in PLACEMENTS]
    for row in figures().values():
        assert 0.0 < row.hit_rate < 1.0
        assert row.loads_per_hour > 0
        assert 0.0 < row.used_share <= 1.0
    starved = figures()["KubeAI: a pod for each model"]
    assert starved.num_not_served > 100
    assert all(row.num_not_served < 20 for row in figures().values() if row is not starved)


def test_the_same_seed_gives_the_same_placements() -> None:
    again = compare_placements(3, PLACEMENTS[:1], DEMAND, 100)
    assert again == [figures()["Naru"]]
