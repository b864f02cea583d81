"""Placing requests for models that nobody has ready, what workers lack, waiting rooms, remembered facts: all pure."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import LoadError, NaruError, Overloaded, Unavailable
from naru_proto.registry import (
    FootprintRecord,
    KnownRecord,
    ModelInfoRecord,
    ModelRecord,
    ResidentRecord,
    WorkerRecord,
)
from naru_router.core.bridge import MODELS_GRACE_S, WORKERS_GRACE_S, Board, bridged
from naru_router.core.errors import error_shape, with_eta
from naru_router.core.holding import Holder, Nearness, RingSettings, absence, nearness, place, placed_at
from naru_router.core.load_choice import choose_worker
from naru_router.core.load_time import UNKNOWN, TimeLeft, time_left
from naru_router.core.retry import AttemptFailed, FailureKind, decide_retry
from naru_router.core.route_map import RouteMap, remember
from naru_router.core.waiting import Outlook, WaitingRoom, check_hope, still_loading, unavailable

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
    assert placement.is_raising is (chosen.nearness not in under_way)
    told = placed_at(candidates, chosen.worker_id, "because")
    assert told is not None and told.decision.worker_id == chosen.worker_id
    assert told.is_held and not told.is_raising and told.decision.reasons[-1] == "because"
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


def test_a_site_that_is_no_candidate_gets_no_request() -> None:
    assert placed_at(unlisted("a", "b"), "c", "because") is None
    assert placed_at([Holder("a", Nearness.OUTDATED, 0)], "a", "because") is None


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


FOOTPRINT = FootprintRecord(1, 1, load_s=10.0, fetch_s=100.0)


@pytest.mark.parametrize(
    ("told_s", "told_age_s", "footprint", "is_near", "elapsed_s", "expected"),
    [
        (8.0, 0.0, FOOTPRINT, True, 5.0, TimeLeft(8.0, is_told=True)),
        (8.0, 3.0, None, False, 3.0, TimeLeft(5.0, is_told=True)),
        (8.0, 20.0, None, False, 20.0, TimeLeft(2.0, is_told=True)),
        (0.0, 0.0, FOOTPRINT, True, 4.0, TimeLeft(6.0)),
        (0.0, 0.0, FOOTPRINT, False, 4.0, TimeLeft(96.0)),
        (0.0, 0.0, FOOTPRINT, True, 50.0, TimeLeft(5.0)),
        (0.0, 0.0, FootprintRecord(1, 1, load_s=10.0), False, 0.0, TimeLeft(10.0)),
        (0.0, 0.0, FootprintRecord(1, 1), False, 3.0, UNKNOWN),
        (0.0, 0.0, None, True, 3.0, UNKNOWN),
        (float("inf"), 0.0, FootprintRecord(1, 1, load_s=float("nan")), True, 3.0, UNKNOWN),
    ],
)
def test_what_is_left_of_a_load_is_the_workers_word_or_the_last_load_less_the_time_since(
    told_s: float,
    told_age_s: float,
    footprint: FootprintRecord | None,
    is_near: bool,
    elapsed_s: float,
    expected: TimeLeft,
) -> None:
    left = time_left(told_s, told_age_s, footprint, is_near=is_near, elapsed_s=elapsed_s)
    assert left.left_s == pytest.approx(expected.left_s)
    assert left.is_told is expected.is_told


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_nobody_is_told_to_come_back_at_once_or_never(
    told_s: float, load_s: float, elapsed_s: float, is_near: bool
) -> None:
    record = FootprintRecord(1, 1, load_s=load_s)
    left = time_left(told_s, elapsed_s, record, is_near=is_near, elapsed_s=elapsed_s)
    assert left.retry_after_s == 0.0 if not left.left_s else 1.0 <= left.retry_after_s <= 2e6


@pytest.mark.parametrize(
    ("left", "rest_s", "is_refused"),
    [
        (TimeLeft(60.0, is_told=True), 30.0, True),
        (TimeLeft(33.0, is_told=True), 30.0, False),
        (TimeLeft(3.0, is_told=True), 1.0, False),
        (TimeLeft(4.0, is_told=True), 1.0, True),
        (TimeLeft(600.0), 1.0, False),
        (UNKNOWN, 0.1, False),
    ],
)
def test_only_a_workers_own_word_and_a_clear_margin_refuse_a_wait_before_it_begins(
    left: TimeLeft, rest_s: float, is_refused: bool
) -> None:
    if not is_refused:
        check_hope("m", left, rest_s)
        return
    with pytest.raises(Unavailable, match=r"'m' is being loaded, about [0-9]+ s more") as caught:
        check_hope("m", left, rest_s)
    assert caught.value.retry_after_s == left.retry_after_s


@pytest.mark.parametrize(
    ("outlook", "is_over", "text"),
    [
        (Outlook(1, 0, ("w: broken",)), True, "failed to load; w: broken"),
        (Outlook(0, 2), True, "no worker knows"),
        (Outlook(1, 2), True, "still loading, about 13 s more"),
        (Outlook(1, 0), False, "no worker holds"),
        (Outlook(), True, "no worker holds"),
    ],
)
def test_the_end_of_a_wait_says_why_and_when_to_come_back(outlook: Outlook, is_over: bool, text: str) -> None:
    error = unavailable("m", outlook, TimeLeft(10.0), is_over=is_over)
    assert text in error.message and error_shape(error).retry_after_s == 13
    assert error_shape(still_loading("m", UNKNOWN)).retry_after_s == 2


def test_a_full_room_says_when_to_come_back_and_every_change_is_told() -> None:
    told: list[tuple[str, int]] = []
    room = WaitingRoom(on_change=lambda model, count: told.append((model, count)))
    with room.seat("a", 1) as seat:
        seat.take()
        with room.seat("a", 1, lambda: 6.5) as late, pytest.raises(Overloaded) as caught:
            late.take()
        assert (error_shape(caught.value).status, error_shape(caught.value).retry_after_s) == (429, 7)
    assert told == [("a", 1), ("a", 0)]


def copies(**workers: dict[str, ResidentRecord]) -> RouteMap:
    records = {
        name: WorkerRecord(name, "h:1", "e", models, budget_bytes=100, used_bytes=0) for name, models in workers.items()
    }
    models = {name: ModelRecord(name, "file:///", 1) for name in ("m", "n")}
    footprints = {name: FootprintRecord(60, 0) for name in models}
    return RouteMap(models, records, {}, {}, {}, footprints)


def test_a_cold_model_comes_up_where_placement_says_among_those_that_may_be_asked() -> None:
    route_map = copies(w0={}, w1={}, w2={})
    assert choose_worker(route_map, "m", {"w0", "w1", "w2"}) == "w0"
    assert choose_worker(route_map, "m", {"w1", "w2"}) == "w1"
    assert choose_worker(route_map, "m", set()) is None
    assert choose_worker(route_map, "gone", {"w0"}) is None
    near = dataclasses.replace(route_map, known={"w2": {"m": KnownRecord("host", 60)}})
    assert choose_worker(near, "m", {"w0", "w1", "w2"}) == "w2"


def test_a_model_that_was_sent_somewhere_a_moment_ago_takes_its_room_there() -> None:
    route_map = copies(w0={}, w1={})
    assert choose_worker(route_map, "m", {"w0", "w1"}, {"n": "w0"}) == "w1"
    assert choose_worker(route_map, "m", {"w0", "w1"}, {"m": "w1", "n": "w1"}) == "w0"
