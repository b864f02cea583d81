"""What a router makes of its workers by how its requests end there: on trial, slow, late; and that it forgets them."""

from __future__ import annotations

from typing import Any

import pytest

from naru_proto.errors import InternalError, InvalidRequest, Unavailable
from naru_router.adapters.health import SOUND, TIDY_INTERVAL_S, Condition, Health, Incarnation
from naru_router.adapters.metrics import Metrics
from naru_router.core.breaker import DEFAULTS
from naru_router.core.retry import AttemptFailed, FailureKind
from naru_router.core.slow_workers import DEFAULTS as SLOWNESS

MODEL = "m"
A, B, C = ("a", "1"), ("b", "1"), ("c", "1")
LIFE = object()


class World:
    """Health with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = Metrics()
        self.health = Health(self.metrics, clock=lambda: self.now_s)

    def serve(
        self, worker: Incarnation, took_s: float = 0.1, expected_s: float | None = 0.1, model: str = MODEL
    ) -> None:
        sending = self.health.sent(worker, model, 10, expected_s)
        self.now_s += took_s
        sending.first_output()
        sending.ended()

    def fail(self, worker: Incarnation, failed: AttemptFailed | None = None, life: object = LIFE) -> None:
        sending = self.health.sent(worker, MODEL, 10, 0.1)
        sending.failed(failed or broken(), life)
        sending.ended()

    def condition(self, worker: Incarnation, model: str = MODEL) -> Condition:
        return self.health.condition(worker, model, self.now_s)

    def num_kept(self) -> int:
        it = self.health
        steps = sum(len(figures.steps) for figures in it._slow._workers.values())
        return len(it._breakers) + len(it._meters) + len(it._slow._workers) + len(it._seen) + len(it._suspects) + steps


def broken(kind: FailureKind = FailureKind.WORKER_ERROR, error: Any = None) -> AttemptFailed:
    return AttemptFailed(error or InternalError("its engine broke"), kind, is_retryable=True)


@pytest.fixture
def world() -> World:
    return World()


def test_faults_in_a_row_put_a_worker_aside_for_that_model(world: World) -> None:
    for _ in range(DEFAULTS.max_faults):
        assert world.condition(A) == SOUND
        world.fail(A)
    assert world.condition(A).is_suspect and not world.condition(A).is_probe
    assert world.condition(A, "other") == SOUND == world.condition(B) == world.condition(("a", "2"))
    assert b'naru_router_circuits_opened_total{worker="a"} 1.0' in world.metrics.exposition()


def test_after_a_pause_one_request_tries_it_and_its_answer_counts(world: World) -> None:
    for _ in range(DEFAULTS.max_faults):
        world.fail(A)
    world.now_s += DEFAULTS.min_pause_s
    assert world.condition(A).is_probe
    probe = world.health.sent(A, MODEL, 10, 0.1)
    assert world.condition(A).is_suspect, "it is on its way"
    probe.first_output()
    assert world.condition(A) == SOUND


def test_a_try_whose_client_leaves_is_followed_by_another(world: World) -> None:
    for _ in range(DEFAULTS.max_faults):
        world.fail(A)
    world.now_s += DEFAULTS.min_pause_s
    probe = world.health.sent(A, MODEL, 10, 0.1)
    probe.ended()
    probe.ended()
    assert world.condition(A).is_probe


def test_one_break_of_a_stream_is_one_fault_however_many_requests_it_ends(world: World) -> None:
    sent = [world.health.sent(A, MODEL, 10, 0.1) for _ in range(10)]
    for sending in sent:
        sending.failed(broken(FailureKind.STREAM_LOST, Unavailable("gone")), LIFE)
        sending.ended()
    assert world.condition(A) == SOUND


@pytest.mark.parametrize("error", [InvalidRequest("no such token")])
def test_what_a_sound_worker_says_of_a_request_is_no_fault(world: World, error: Any) -> None:
    for _ in range(10):
        world.fail(A, broken(error=error))
    assert world.condition(A) == SOUND


def test_a_request_that_waits_for_a_load_says_nothing_and_tries_nothing(world: World) -> None:
    for _ in range(DEFAULTS.max_faults):
        world.fail(A)
    world.now_s += DEFAULTS.min_pause_s
    held = world.health.sent(A, MODEL, 10, None)
    assert world.condition(A).is_probe, "it is not the one that tries it"
    held.failed(broken(), LIFE)
    held.ended()
    assert world.condition(A).is_probe
    world.serve(A, took_s=30.0, expected_s=None)
    assert world.condition(A).is_probe and not world.health._meters[A, MODEL].num_waiting


def test_how_long_requests_wait_for_their_turn_is_seen(world: World) -> None:
    waiting = [world.health.sent(A, MODEL, 100, 0.1) for _ in range(8)]
    for sending in waiting[:6]:
        world.now_s += 1.0
        sending.first_output()
    # 100 tokens and what a request weighs beside them take a second: two of them wait.
    assert world.condition(A).observed_wait_s == pytest.approx(2.0, rel=0.2)
    assert world.condition(B).observed_wait_s == 0.0
    for sending in waiting:
        sending.ended()
    assert world.condition(A) == SOUND


def slow_down(world: World) -> None:
    """A request a second to each, and a review, until `a`, which takes ten times as long as it should, is put aside."""
    for _ in range(40):
        if world.condition(A).is_suspect:
            return
        world.now_s += 0.7
        for worker, took_s in ((A, 1.0), (B, 0.1), (C, 0.1)):
            began_s = world.now_s
            world.serve(worker, took_s)
            world.now_s = began_s + 0.1
        world.health.review()
    raise AssertionError("nobody is put aside")


def test_a_worker_that_is_slow_for_long_is_put_aside_and_tried_later(world: World) -> None:
    slow_down(world)
    assert world.condition(A).is_suspect and world.condition(A, "other").is_suspect, "it is the machine"
    assert world.condition(B) == SOUND
    world.now_s += SLOWNESS.circuit.min_pause_s
    assert world.condition(A).is_probe
    sending = world.health.sent(A, MODEL, 10, 0.1)
    assert world.condition(A).is_suspect
    world.now_s += 0.1
    sending.first_output()
    assert world.condition(A) == SOUND


def test_a_try_that_nothing_can_be_measured_by_is_followed_by_another(world: World) -> None:
    slow_down(world)
    world.now_s += SLOWNESS.circuit.min_pause_s
    sending = world.health.sent(A, MODEL, 0, 0.0)
    assert world.condition(A).is_suspect
    sending.first_output()
    assert world.condition(A).is_probe


def test_nothing_is_kept_of_workers_and_models_that_are_gone(world: World) -> None:
    for number in range(200):
        worker = ("a", f"{number}")
        world.health.told_steps(worker, [(f"m@{number}", 0.01)])
        world.health.keep({worker}, {f"m@{number}"})
        for _ in range(DEFAULTS.max_faults):
            world.fail(worker)
        world.serve(worker, model=f"m@{number}")
        world.now_s += TIDY_INTERVAL_S
    world.health.review()
    world.health.keep({worker}, {MODEL})
    assert world.num_kept() <= 5
    late = world.health.sent(worker, MODEL, 10, 0.1)
    world.health.keep(set(), set())
    assert world.num_kept() == 0
    for _ in range(DEFAULTS.max_faults):
        late.failed(broken(), LIFE)
    late.ended()
    assert world.num_kept() == 0, "what ends after its worker is gone brings nothing back"


def test_models_come_and_go_on_a_worker_that_stays(world: World) -> None:
    for number in range(100):
        world.serve(A, model=f"m@{number}")
        world.health.told_steps(A, [(f"m@{number}", 0.01)])
        world.now_s += TIDY_INTERVAL_S
        world.health.review()
        world.health.keep({A}, {f"m@{number}"})
    assert world.num_kept() <= 6
