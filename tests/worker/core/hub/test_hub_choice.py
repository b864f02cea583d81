"""What the hub tells the policy about its candidates, and that any policy may take its place."""

from __future__ import annotations

import random
from collections.abc import Sequence

from naru_worker.core.hub.actions import Drain
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask
from naru_worker.core.hub.eviction import Candidate, VictimChooser, Victims, choose_victims
from naru_worker.core.hub.model import Footprint, Residency
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck


def make_worker(choose: VictimChooser = choose_victims) -> VirtualWorker:
    """Three models of 100 bytes fit."""
    config = HubConfig(budget_bytes=300, guard_loads=0.0, reload_floor_s=0.1, high_watermark=1.0, low_watermark=1.0)
    return VirtualWorker(config, lambda name: Footprint(name, 90, 7, 0, 3), chance=random.Random(0), choose=choose)


def bring_up(worker: VirtualWorker, name: str, load_s: float = 0.05, residency: Residency | None = None) -> None:
    worker.luck = Luck(load_s=load_s)
    worker.ask(Ask(name, 1, "spec", residency=residency or Residency()))
    worker.run_until_quiet()
    worker.run(1.0)


def drained(worker: VirtualWorker) -> list[str]:
    return [action.model for _, action in worker.log if isinstance(action, Drain)]


def test_load_times_below_the_floor_do_not_count_and_those_above_do() -> None:
    worker = make_worker()
    for name, load_s in (("a", 0.09), ("b", 0.01), ("c", 0.01), ("d", 0.01)):
        bring_up(worker, name, load_s)
    assert drained(worker) == ["a"], "plain LRU: 0.09 s is no more than 0.01 s"
    worker = make_worker()
    for name, load_s in (("a", 5.0), ("b", 0.01), ("c", 0.01), ("d", 0.01)):
        bring_up(worker, name, load_s)
    assert drained(worker) == ["b"]


def test_candidates_carry_what_is_known_of_the_models() -> None:
    seen: list[Candidate] = []

    def watch(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
        seen.extend(candidates)
        return choose_victims(candidates, deficit_bytes)

    worker = make_worker(watch)
    bring_up(worker, "pinned", residency=Residency(pinned=True))
    bring_up(worker, "last", load_s=0.5, residency=Residency(priority=300, keep_last_copy=True))
    bring_up(worker, "plain")
    for _ in range(2):
        worker.request("plain", duration_s=0.25)
    worker.run(10.0)
    bring_up(worker, "new")
    last, plain = sorted(seen, key=lambda each: each.name)
    assert (last.name, last.freed_bytes, last.reload_s, last.priority) == ("last", 100, 0.5, 300)
    assert last.is_last_copy and last.uses == 0
    assert (plain.name, plain.reload_s, plain.priority, plain.uses) == ("plain", 0.1, 100, 2)
    assert abs(plain.idle_s - (10.0 - 0.25 + 0.2)) < 1e-6, "since the end of its last request"
    assert drained(worker) == ["plain"]


def test_a_policy_of_ones_own_is_asked_for_victims() -> None:
    seen: list[tuple[str, ...]] = []

    def newest_first(candidates: Sequence[Candidate], deficit_bytes: int) -> Victims | None:
        seen.append(tuple(sorted(each.name for each in candidates)))
        return choose_victims([min(candidates, key=lambda each: each.idle_s)], deficit_bytes)

    worker = make_worker(newest_first)
    for name in "abcd":
        bring_up(worker, name)
    assert drained(worker) == ["c"] and ("a", "b", "c") in seen
