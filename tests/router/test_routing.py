"""Consistent hashing with bounded loads, and the route map's questions: all pure."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_proto.errors import ModelNotFound
from naru_proto.registry import ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.route_map import RouteMap
from naru_router.core.routing.ring import bounded_hash, hash_order, nearest, route_key

NAMES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
KEYS = st.binary(min_size=1, max_size=16)
FACTORS = st.floats(1.0, 4.0)


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, int]:
    return {name: draw(st.integers(0, 40)) for name in draw(NAMES)}


@given(fleets(), KEYS, FACTORS, st.randoms(use_true_random=False))
def test_the_order_of_workers_is_irrelevant(loads: dict[str, int], key: bytes, c: float, rnd: random.Random) -> None:
    shuffled = rnd.sample(list(loads.items()), len(loads))
    assert bounded_hash(loads, key, load_factor=c) == bounded_hash(dict(shuffled), key, load_factor=c)


@given(fleets(), KEYS, FACTORS)
def test_no_worker_goes_above_its_capacity(loads: dict[str, int], key: bytes, c: float) -> None:
    decision = bounded_hash(loads, key, load_factor=c)
    assert decision.capacity == math.ceil(c * (sum(loads.values()) + 1) / len(loads))
    assert loads[decision.worker_id] + 1 <= decision.capacity
    assert decision.reasons


@settings(max_examples=25)
@given(NAMES, st.integers(1, 60), FACTORS)
def test_loads_stay_bounded_as_one_key_arrives_again_and_again(names: list[str], count: int, c: float) -> None:
    loads = Counter(dict.fromkeys(names, 0))
    for _ in range(count):
        decision = bounded_hash(loads, b"hot", load_factor=c)
        loads[decision.worker_id] += 1
        assert loads[decision.worker_id] <= math.ceil(c * loads.total() / len(names))


def test_an_idle_fleet_keeps_a_key_on_one_worker() -> None:
    loads = {f"w{i}": 0 for i in range(8)}
    assert len({bounded_hash(loads, b"key").worker_id for _ in range(5)}) == 1


@given(NAMES, KEYS)
def test_the_first_on_the_ring_is_the_head_of_its_order(names: list[str], key: bytes) -> None:
    order = hash_order(names, key, 16)
    assert sorted(order) == sorted(names)
    assert (
        nearest(names, key, 16)
        == order[0]
        == bounded_hash(dict.fromkeys(names, 0), key, num_virtual_nodes=16).worker_id
    )


def test_a_key_goes_to_the_next_point_clockwise_on_the_ring_of_all_workers() -> None:
    def point(data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")

    names = ["a", "b", "c"]
    ring = sorted((point(f"{i}:{name}".encode()), name) for name in names for i in range(4))
    for number in range(200):
        key = number.to_bytes(2, "big")
        home = next((name for at, name in ring if at >= point(key)), ring[0][1])
        assert nearest(names, key, 4) == home


def place(names: list[str], num_keys: int = 4000) -> dict[int, str]:
    loads = dict.fromkeys(names, 0)
    return {k: bounded_hash(loads, f"{k}".encode()).worker_id for k in range(num_keys)}


def test_a_worker_that_comes_or_goes_moves_its_share_of_keys_only() -> None:
    names = [f"worker-{i}" for i in range(10)]
    before, after = place(names[:9]), place(names)
    moved = [k for k in before if before[k] != after[k]]
    assert all(after[k] == names[9] for k in moved)
    # Expected 1/10 of 4000 keys; a ring of 128 points a worker varies by about a tenth of that.
    assert 250 < len(moved) < 600


def test_keys_spread_over_workers() -> None:
    counts = Counter(place([f"worker-{i}" for i in range(10)]).values())
    assert len(counts) == 10 and 200 < min(counts.values()) and max(counts.values()) < 640


def test_a_full_worker_passes_its_keys_to_the_next_one() -> None:
    idle = {f"w{i}": 0 for i in range(4)}
    home = bounded_hash(idle, b"k").worker_id
    full = {**idle, home: 10}
    decision = bounded_hash(full, b"k")
    assert decision.worker_id != home and decision.num_skipped == 1
    # The same worker the key would have if its home did not exist.
    del full[home]
    assert decision.worker_id == bounded_hash(full, b"k").worker_id


def test_keys_tell_parts_and_models_apart() -> None:
    keys = [
        route_key("m", ["ab", "c"]),
        route_key("m", ["a", "bc"]),
        route_key("n", ["ab", "c"]),
        route_key("m", ["abc"]),
    ]
    assert len(set(keys)) == 4


def worker(worker_id: str, state: str = "ready", model: str = "m", *, draining: bool = False) -> WorkerRecord:
    resident = ResidentRecord(state=state, info_digest="d" if state == "ready" else "", error="why")
    return WorkerRecord(worker_id, "127.0.0.1:1", "e", {model: resident}, draining=draining)


def route_map(*workers: WorkerRecord) -> RouteMap:
    models = {
        "m": ModelRecord("m", "file:///", 1, aliases=("small", "n")),
        "n": ModelRecord("n", "file:///", 1, aliases=("small", "other")),
    }
    info = ModelInfoRecord("llama", 10, 10, "t", "", "")
    return RouteMap(models, {w.worker_id: w for w in workers}, {"d": info})


def test_names_come_before_aliases_and_earlier_models_before_later_ones() -> None:
    board = route_map()
    assert {name: board.resolve(name).model.name for name in board.names()} == {
        "m": "m", "n": "n", "small": "m", "other": "n",
    }  # fmt: skip


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match="m, n, other, small"):
        route_map().resolve("x")
    with pytest.raises(ModelNotFound, match="none yet"):
        RouteMap().resolve("x")
    many = RouteMap({f"m{i:03}": ModelRecord(f"m{i:03}", "file:///", 1) for i in range(50)})
    with pytest.raises(ModelNotFound, match="m019 and 30 more"):
        many.resolve("x")


def test_workers_are_told_apart_by_state() -> None:
    states = ["cold", "fetching", "loading", "ready", "draining", "failed"]
    board = route_map(
        *(worker(state, state) for state in states), worker("leaving", draining=True), worker("x", model="n")
    )
    assert [w.worker_id for w in board.ready_workers("m")] == ["ready"]
    assert board.failures("m") == ["failed: why"]
    assert board.info("m") is not None and board.info("absent") is None
