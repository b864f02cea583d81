"""Any mix of commands, requests, delays and failures: what always holds does hold, and all ends well when it is quiet.

The virtual worker checks its own ledger and counts against the hub's after each event; see `core/hub/testing.py`.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from naru_proto.errors import LoadError, NaruError
from naru_worker.core.hub.actions import Changed
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Move, Release
from naru_worker.core.hub.model import Footprint, Residency, Tier
from naru_worker.core.hub.testing import VirtualWorker
from naru_worker.core.hub.testing_memory import Luck
from naru_worker.core.residency import ModelState

NAMES = ("a", "b", "c", "d", "e", "f")


class Step(NamedTuple):
    """One thing that happens from outside, after a pause."""

    kind: str
    model: str
    tier: Tier
    number: int
    is_pinned: bool
    pause_s: float


STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(
            ["ask", "ask", "move", "request", "request", "request", "release", "cancel", "stale", "wait"]
        ),
        model=st.sampled_from(NAMES),
        tier=st.sampled_from([Tier.COLD, Tier.HOST, Tier.ACTIVE, Tier.ACTIVE]),
        number=st.integers(0, 5),
        is_pinned=st.sampled_from([False, False, False, True]),
        pause_s=st.sampled_from([0.0, 0.0, 0.01, 0.03, 0.1, 0.21, 0.3, 1.0, 4.0]),
    ),
    min_size=10,
    max_size=60,
)
FOOTPRINTS = st.lists(
    st.builds(
        Footprint,
        weights_key=st.sampled_from(["k1", "k2", "k3", "k4", "k5", "k6", "k7"]),
        weight_bytes=st.just(0),
        kv_floor_bytes=st.integers(0, 10),
        workspace_bytes=st.integers(0, 20),
        private_bytes=st.integers(0, 5),
        asleep_bytes=st.sampled_from([0, 0, 1, 20]),
    ),
    min_size=len(NAMES),
    max_size=len(NAMES),
)
SIZES = st.fixed_dictionaries({f"k{number}": st.integers(1, 60) for number in range(1, 8)})
LUCKS = st.builds(
    Luck,
    fetch_s=st.sampled_from([0.0, 0.2]),
    load_s=st.sampled_from([0.0, 0.05, 0.4]),
    unload_s=st.sampled_from([0.0, 0.02, 0.3]),
    request_s=st.sampled_from([0.01, 0.5, 3.0]),
    jitter=st.sampled_from([0.0, 0.9]),
    fetch_fails=st.sampled_from([0.0, 0.2]),
    load_fails=st.sampled_from([0.0, 0.2]),
    failure_is_permanent=st.sampled_from([0.0, 0.3]),
    keeps_bytes=st.sampled_from([0.0, 0.3]),
    not_kept=st.sampled_from([0.0, 0.3]),
    wake_fails=st.sampled_from([0.0, 0.3]),
    kv_grows=st.sampled_from([0.0, 0.7]),
    stop_is_late=st.sampled_from([0.0, 0.5]),
)
CONFIGS = st.builds(
    HubConfig,
    budget_bytes=st.integers(40, 300),
    host_budget_bytes=st.sampled_from([0, 50, 100, 1000]),
    high_watermark=st.sampled_from([0.8, 1.0]),
    low_watermark=st.sampled_from([0.5, 0.7]),
    max_loads=st.integers(1, 3),
    max_fetches=st.integers(1, 3),
    guard_loads=st.sampled_from([0.0, 5.0]),
    fair_wait_s=st.sampled_from([0.0, 1.0]),
    max_known_models=st.just(100),
)


def play(
    config: HubConfig, footprints: dict[str, Footprint], luck: Luck, steps: list[Step], seed: int
) -> VirtualWorker:
    """Plays the steps; refusals change nothing."""
    worker = VirtualWorker(config, footprints, chance=random.Random(seed), luck=luck)
    generations = dict.fromkeys(NAMES, 1)
    taken = dict(generations)
    """Those that were not refused."""
    specs = dict.fromkeys(NAMES, 0)
    requests: list[tuple[str, int]] = []
    for step in steps:
        worker.run(step.pause_s)
        assert all(worker.hub.explain(name, worker.now_s) for name in worker.bodies)
        generation = generations[step.model]
        residency = Residency(
            pinned=step.is_pinned,
            min_residency_s=float(step.number == 1),
            idle_ttl_s=2.0 * (step.number == 2),
            keep_last_copy=step.number == 3,
        )
        entry = worker.hub.entry(step.model)
        if step.kind == "ask":
            if step.number == 0:
                generations[step.model] += 1
                specs[step.model] += step.is_pinned
            spec = (step.model, specs[step.model])
            ask = Ask(step.model, generations[step.model], spec, step.tier, 0, residency, step.number == 4)
            try:
                worker.ask(ask)
            except LoadError as error:
                assert "bytes" in error.message
            else:
                taken[step.model] = ask.generation
        elif step.kind == "release":
            generations[step.model] += 1
            taken[step.model] = generations[step.model]
            tier = None if step.tier is Tier.ACTIVE else step.tier
            worker.release(Release(step.model, generations[step.model], 0, tier, float(step.number)))
        elif step.kind == "move":
            before = repr(entry), worker.hub.memory
            try:
                worker.move(Move(step.model, step.tier, 0, step.number == 1, float(step.number), step.number == 4))
            except NaruError as error:
                assert (repr(entry), worker.hub.memory) == before, error
            else:
                assert entry is not None and entry.is_wanted and entry.generation == taken[step.model]
        elif step.kind == "request" and entry is not None and entry.is_wanted:
            requests.append((step.model, worker.request(step.model)))
        elif step.kind == "cancel" and requests:
            worker.cancel(*requests[step.number % len(requests)])
        elif step.kind == "stale" and entry is not None and entry.generation > 0:
            before = repr(entry), worker.hub.memory
            with pytest.raises(NaruError):
                worker.ask(Ask(step.model, entry.generation - 1, "old"))
            assert (repr(entry), worker.hub.memory) == before and generation == generations[step.model]
    return worker


def footprints_of(drawn: list[Footprint], sizes: dict[str, int]) -> dict[str, Footprint]:
    """Equal keys have equal weights."""
    return {
        name: Footprint(
            each.weights_key,
            sizes[each.weights_key],
            each.kv_floor_bytes,
            each.workspace_bytes,
            each.private_bytes + each.asleep_bytes,
            asleep_bytes=each.asleep_bytes,
        )
        for name, each in zip(NAMES, drawn, strict=True)
    }


def check_evictions(worker: VirtualWorker) -> None:
    """No model was evicted for another within its guard after it began to serve, and none that was still loading."""
    ready_since_s: dict[str, float] = {}
    guard_s = worker.config.guard_loads * worker.luck.load_s
    for time_s, action in worker.log:
        if isinstance(action, Changed):
            if action.old is ModelState.LOADING:
                ready_since_s[action.model] = time_s
            elif action.new is ModelState.DRAINING and action.reason.startswith("evicted for"):
                assert action.old.is_serving, action
                assert time_s >= ready_since_s[action.model] + guard_s, action
            assert not action.is_eviction or action.new in (ModelState.COLD, ModelState.HOST, ModelState.FAILED), action


MANY = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@MANY
@given(CONFIGS, FOOTPRINTS, SIZES, LUCKS, STEPS, st.integers(0, 2**32))
def test_whatever_happens_bytes_and_counts_stay_true_and_every_request_ends(
    config: HubConfig, drawn: list[Footprint], sizes: dict[str, int], luck: Luck, steps: list[Step], seed: int
) -> None:
    worker = play(config, footprints_of(drawn, sizes), luck, steps, seed)
    worker.run_until_quiet()
    check_evictions(worker)
    for name, body in worker.bodies.items():
        assert not body.running and body.operation is None, f"{name!r} is never done: {body}"
        assert not body.held, f"{len(body.held)} requests hang: {worker.hub.explain(name, worker.now_s)}"
    memory = worker.hub.memory
    assert memory.reserved_bytes == 0 and memory.used_bytes == worker.used_bytes


@settings(MANY, max_examples=40)
@given(CONFIGS, FOOTPRINTS, SIZES, LUCKS, STEPS, st.integers(0, 2**32))
def test_equal_events_give_equal_actions(
    config: HubConfig, drawn: list[Footprint], sizes: dict[str, int], luck: Luck, steps: list[Step], seed: int
) -> None:
    one, other = (play(config, footprints_of(drawn, sizes), luck, steps, seed) for _ in range(2))
    assert one.log == other.log and one.outcomes == other.outcomes


LAST_WISH = {
    ("ask", Tier.COLD): ModelState.COLD,
    ("ask", Tier.HOST): ModelState.HOST,
    ("ask", Tier.ACTIVE): ModelState.READY,
    ("release", Tier.COLD): ModelState.COLD,
    ("release", Tier.HOST): ModelState.HOST,
    ("release", None): ModelState.COLD,
    ("request", None): ModelState.READY,
}


@MANY
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES[:3]),
            st.sampled_from(sorted(LAST_WISH, key=str)),
            st.sampled_from([0.0, 0.02, 0.05, 0.2, 0.23, 1.0]),
        ),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**32),
)
def test_with_room_for_all_each_model_ends_where_it_was_wanted_last(
    wishes: list[tuple[str, tuple[str, Tier | None], float]], jitter: float, stop_is_late: float, seed: int
) -> None:
    """An ask below what requests have raised is the exception: their demand outlives it."""
    config = HubConfig(budget_bytes=10_000, host_budget_bytes=10_000, max_loads=2, max_fetches=2)
    luck = Luck(jitter=jitter, stop_is_late=stop_is_late)
    worker = VirtualWorker(config, lambda name: Footprint(name, 90, 5, 10, 5), chance=random.Random(seed), luck=luck)
    last: dict[str, ModelState] = {}
    raised: set[str] = set()
    for generation, (model, (kind, tier), pause_s) in enumerate(wishes, start=1):
        entry = worker.hub.entry(model)
        if kind == "ask":
            worker.ask(Ask(model, generation, "spec", tier or Tier.COLD))
        elif kind == "release":
            worker.release(Release(model, generation, 0, tier, 0.1))
            raised.discard(model)
        elif entry is None or not entry.is_wanted:
            continue
        else:
            worker.request(model)
            raised.add(model)
        was_forgotten = entry is None or not entry.is_wanted
        last[model] = ModelState.COLD if kind == "release" and was_forgotten else LAST_WISH[kind, tier]
        worker.run(pause_s)
    worker.run_until_quiet()
    for model, expected in last.items():
        entry = worker.hub.entry(model)
        assert entry is not None
        allowed = {expected, ModelState.READY} if model in raised else {expected}
        assert entry.state in allowed, worker.hub.explain(model, worker.now_s)
