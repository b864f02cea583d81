"""Placing requests for models that nobody has ready, what workers lack, waiting rooms, remembered facts: all pure."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import LoadError, NaruError, Overloaded, Unavailable
from naru_proto.registry import ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.bridge import MODELS_GRACE_S, WORKERS_GRACE_S, Board, bridged
from naru_router.core.errors import error_shape, with_eta
from naru_router.core.holding import Holder, Nearness, RingSettings, absence, nearness, place
from naru_router.core.retry import AttemptFailed, FailureKind, decide_retry
from naru_router.core.route_map import RouteMap, remember
from naru_router.core.waiting import WaitingRoom

RING = RingSettings(1.25, 128)
MODEL = ModelRecord("m", "file:///", 3, pools=("default",))


def worker(state: str = "", generation: int = 3, epoch: int = 0, **fields: object) -> WorkerRecord:
    models = {"m": ResidentRecord(state, generation, epoch=epoch)} if state else {}
    return dataclasses.replace(WorkerRecord("w", "h:1", "e", models), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("ready", Nearness.READY),
        ("loading", Nearness.LOADING),
        ("host", Nearness.HOST),
        ("fetching", Nearness.FETCHING),
        ("", Nearness.UNLISTED),
        ("cold", Nearness.UNLISTED),
        ("draining", Nearness.UNLISTED),
        ("failed", Nearness.FAILED),
        ("of a later version", None),
    ],
)
def test_nearness_follows_the_lease(state: str, expected: Nearness | None) -> None:
    assert nearness(worker(state), MODEL) is expected
    assert nearness(worker(state, draining=True), MODEL) is None
    old = nearness(worker(state, generation=2), MODEL)
    assert old is (expected if state in ("ready", "", "of a later version") else Nearness.OUTDATED)


def test_a_worker_of_another_pool_is_asked_only_where_it_holds_the_model() -> None:
    assert nearness(worker(pool="other"), MODEL) is None
    assert nearness(worker(pool="other"), dataclasses.replace(MODEL, pools=())) is Nearness.UNLISTED
    assert nearness(worker("ready", pool="other"), MODEL) is Nearness.READY


@st.composite
def holders(draw: st.DrawFn) -> list[Holder]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=8, unique=True))
    count = st.integers(0, 20)
    return [
        Holder(
            name,
            draw(st.sampled_from(list(Nearness))),
            draw(count),
            draw(count),
            draw(st.integers(0, 2)),
            draw(st.booleans()),
        )
        for name in names
    ]


@given(holders(), st.binary(min_size=1, max_size=8), st.booleans(), st.randoms())
def test_the_nearest_that_stays_is_asked_and_order_is_irrelevant(
    candidates: list[Holder], key: bytes, may_raise: bool, rnd: object
) -> None:
    placement = place(candidates, "m", key, RING, may_raise=may_raise)
    shuffled = list(candidates)
    rnd.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(shuffled, "m", key, RING, may_raise=may_raise) == placement
    under_way = {Nearness.READY, Nearness.LOADING, Nearness.FETCHING}
    allowed = [c for c in candidates if c.nearness is not Nearness.OUTDATED and (may_raise or c.nearness in under_way)]
    if not allowed:
        assert placement is None
        return
    assert placement is not None
    chosen = next(c for c in candidates if c.worker_id == placement.decision.worker_id)
    assert chosen in allowed
    ready = [c for c in allowed if c.nearness is Nearness.READY]
    hopeful = [c for c in allowed if c.nearness is not Nearness.FAILED]
    peers = ready or hopeful or allowed
    peers = [c for c in peers if not c.is_leaving] or peers
    assert chosen in peers and chosen.nearness is min(c.nearness for c in peers)
    assert placement.is_held is (chosen.nearness is not Nearness.READY)
    if chosen.nearness not in under_way:
        # Requests gather where some wait already.
        assert chosen.num_held or not any(c.num_held for c in peers if c.nearness is chosen.nearness)


def unlisted(*ids: str) -> list[Holder]:
    return [Holder(worker_id, Nearness.UNLISTED, 0) for worker_id in ids]


def home(candidates: list[Holder], model: str = "m", key: bytes = b"k") -> str:
    placement = place(candidates, model, key, RING, may_raise=True)
    assert placement is not None
    return placement.decision.worker_id


def test_routers_that_know_nothing_of_each_other_ask_the_same_worker_whatever_the_prompt() -> None:
    workers = unlisted("a", "b", "c")
    busy = [dataclasses.replace(each, num_in_flight=index * 9) for index, each in enumerate(workers)]
    assert len({home(candidates, key=bytes([key])) for key in range(20) for candidates in (workers, busy)}) == 1


def test_models_spread_over_workers_and_none_gets_more_than_its_share() -> None:
    rising: Counter[str] = Counter()
    for index in range(60):
        workers = [Holder(each, Nearness.UNLISTED, 0, num_rising=rising[each]) for each in "abc"]
        rising[home(workers, model=f"m{index}")] += 1
    assert max(rising.values()) <= 26 and sum(rising.values()) == 60


def test_a_lack_is_believed_until_the_lease_gives_a_reason_to_ask_again() -> None:
    unlisted_then = absence(worker(num_known=5), "m")
    assert unlisted_then.holds_for(worker(num_known=5, num_running=9), "m")
    assert not unlisted_then.holds_for(worker(num_known=6), "m")
    assert not unlisted_then.holds_for(worker("fetching", num_known=5), "m")
    ready_then = absence(worker("ready", num_known=5), "m")
    assert ready_then.was_ready and not unlisted_then.was_ready
    assert ready_then.holds_for(worker("ready", num_known=6), "m")
    assert not ready_then.holds_for(worker("ready", num_known=5, epoch=1), "m")
    assert not ready_then.holds_for(worker(), "m")


@pytest.mark.parametrize(
    ("error", "kind", "was_held", "may_raise"),
    [
        (Unavailable("x"), FailureKind.WORKER_ERROR, False, False),
        (Overloaded("x"), FailureKind.WORKER_ERROR, False, False),
        (Unavailable("x"), FailureKind.STREAM_LOST, False, True),
        (Unavailable("x"), FailureKind.WORKER_ERROR, True, True),
        (Overloaded("x"), FailureKind.WORKER_ERROR, True, False),
    ],
)
def test_a_second_copy_is_loaded_for_a_lost_or_rejected_one_and_not_for_a_busy_one(
    error: NaruError, kind: FailureKind, was_held: bool, may_raise: bool
) -> None:
    failed = AttemptFailed(error, kind, is_retryable=True)
    verdict = decide_retry(failed, num_attempts=1, has_sent=False, was_held=was_held)
    assert verdict.is_retry and verdict.may_raise is may_raise


def test_a_waiting_room_has_its_seats_for_each_model_and_takes_them_back() -> None:
    room = WaitingRoom()
    with room.seat("a", 2) as first, room.seat("a", 2) as second, room.seat("b", 2) as other:
        for seat in (first, second, other, first):
            seat.take()
        assert (room.num_waiting("a"), room.num_waiting("b")) == (2, 1)
        with room.seat("a", 2) as third:
            with pytest.raises(Overloaded, match="2 requests wait for the model 'a'"):
                third.take()
            first.leave()
            first.leave()
            third.take()
        assert room.num_waiting("a") == 1
    assert (room.num_waiting("a"), room.num_waiting("b")) == (0, 0)


@pytest.mark.parametrize(("eta_s", "expected"), [(0.0, 2), (-1.0, 2), (0.2, 1), (6.1, 7), (1e9, 3600)])
def test_retry_after_is_the_time_left_where_it_is_known(eta_s: float, expected: int) -> None:
    error = with_eta(Unavailable("x", param="model"), eta_s)
    assert (error_shape(error).retry_after_s, error_shape(error).status, error.param) == (expected, 503, "model")
    again = copy.copy(error)
    assert (error_shape(again).retry_after_s, again.message, again.param) == (expected, "x", "model")
    for other in (LoadError("x"), Overloaded("x")):
        assert with_eta(other, eta_s) is other


INFO = ModelInfoRecord("llama", 10, 10, "t", "", "")
INFOS = {"d": INFO}


def resident(generation: int, digest: str = "d", **fields: float) -> ResidentRecord:
    return ResidentRecord("ready", generation, digest, **fields)  # type: ignore[arg-type]


def test_facts_outlive_the_copy_and_not_the_generation() -> None:
    models = {"m": MODEL}
    held = {"w": dataclasses.replace(worker(), models={"m": resident(3), "stray": resident(3)})}
    kept = remember({}, models, held, INFOS)
    assert set(kept) == {"m"}
    assert remember(kept, models, {}, {}) == kept
    assert RouteMap(models, {}, {}, kept).info("m") == INFO
    assert remember(kept, {"m": dataclasses.replace(MODEL, generation=4)}, held, INFOS) == {}
    assert remember(kept, {}, {}, {}) == {}


def test_the_time_left_is_that_of_the_fastest_worker_that_stays() -> None:
    etas = {"a": 9.0, "b": 4.0, "c": float("inf"), "d": 0.0, "e": 1.0}
    workers = {
        name: WorkerRecord(name, "h:1", "e", {"m": resident(3, eta_s=eta_s)}, draining=name == "e")
        for name, eta_s in etas.items()
    }
    assert RouteMap({}, workers, {}).eta_s("m") == 4.0
    assert RouteMap({}, {}, {}).eta_s("m") == 0.0


def test_what_a_restarted_redis_has_lost_is_kept_for_a_while() -> None:
    old, new = (ModelRecord(name, "file:///", 1) for name in ("old", "new"))
    changed = dataclasses.replace(old, generation=2)
    before = Board({"old": old}, {"w": worker("ready")})
    first = bridged(before, Board(), 0.0)
    assert first is not None and (first.models, first.workers) == (before.models, before.workers)
    # What is there wins, and workers are given up sooner: theirs would be back.
    later = bridged(before, Board({"old": changed, "new": new}), WORKERS_GRACE_S)
    assert later is not None and later.models == {"old": changed, "new": new} and not later.workers
    assert bridged(before, Board({"new": new}), MODELS_GRACE_S) is None
    assert bridged(before, Board({"old": old, "new": new}, before.workers), 0.0) is None
