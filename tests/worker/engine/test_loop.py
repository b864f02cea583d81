"""The engine thread: whose turn it is, when it sleeps, and who takes part."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.engine.key_news import KeyNews
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.stats import EngineStats
from naru_worker.adapters.memory.kv_space import KVReclaimer, KVSpace
from naru_worker.core.kv_stats import KVStats
from naru_worker.core.request import Request, RequestId

DEADLINE_S = 20.0


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """An engine that only lets time pass; `on_step` sees each step."""

    def __init__(self, clock: Clock, step_s: float = 0.0, on_step: Callable[[], None] = lambda: None) -> None:
        self.stats = EngineStats(num_blocks=1)
        self.kv_space: KVSpace | None = None
        self.key_news = KeyNews()
        self.kv_committed_bytes = 0
        self.clock = clock
        self.step_s = step_s
        self.on_step = on_step
        self.is_working = True
        self.wake_s: float | None = None
        self.age_s = 0.0
        self.num_steps = self.num_asked = self.num_rests = 0
        self.threads: set[int] = set()
        self.was_alone: list[bool] = []

    @property
    def has_work(self) -> bool:
        self.num_asked += 1
        return self.is_working

    def queue_age_s(self) -> float:
        return self.age_s

    def step(self, outbox: Outbox, *, is_alone: bool = True, before_long: Callable[[], object] | None = None) -> None:
        self.was_alone.append(is_alone)
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        self.clock.now_s += self.step_s
        self.on_step()

    def submit(self, request: Request, arrived_s: float, outbox: Outbox) -> None:
        outbox.append(SequenceDelta(request.request_id))

    def cancel(self, request_id: RequestId, error: NaruError | None, outbox: Outbox) -> None:
        outbox.append(SequenceDelta(request_id, error=error, is_last=True))

    def rest(self) -> None:
        self.num_rests += 1

    def trim_kv(self, num_bytes: int) -> int:
        return 0

    def kv_stats(self) -> KVStats:
        raise NotImplementedError


def run_until(clock: Clock, end_s: float, *engines: Worker) -> EngineLoop:
    """Runs the loop in this very thread until so much time has passed."""
    loop = EngineLoop(lambda outbox: None, lambda exc: None, clock=clock)

    def stop_when_over() -> None:
        if clock.now_s >= end_s:
            loop._stop()

    for engine in engines:
        engine.on_step = stop_when_over
        loop.add(engine)
    loop._run()
    return loop


def test_two_busy_models_get_half_of_the_time_each_whatever_their_steps_take() -> None:
    clock = Clock()
    short, long = Worker(clock, 0.003), Worker(clock, 0.040)
    run_until(clock, 30.0, short, long)
    assert short.stats.compute_s == pytest.approx(15.0, rel=0.02)
    assert long.stats.compute_s == pytest.approx(15.0, rel=0.02)
    assert short.num_steps == pytest.approx(5000, rel=0.02)


def test_a_model_whose_requests_wait_gets_more_time_but_not_all() -> None:
    clock = Clock()
    patient, crowded = Worker(clock, 0.004), Worker(clock, 0.004)
    crowded.age_s = 100.0
    run_until(clock, 30.0, patient, crowded)
    assert crowded.stats.compute_s == pytest.approx(20.0, rel=0.02)
    assert patient.stats.compute_s == pytest.approx(10.0, rel=0.02)


def test_a_model_that_waits_for_weights_takes_no_more_than_its_share() -> None:
    """Its steps end after the runner's 30 ms without a result; the other's take 5 ms."""
    clock = Clock()
    busy, pending = Worker(clock, 0.005), Worker(clock, 0.030)
    run_until(clock, 20.0, busy, pending)
    assert busy.num_steps == pytest.approx(2000, rel=0.02)


def test_a_step_may_wait_for_weights_only_where_nobody_else_has_work() -> None:
    clock = Clock()
    one, other = Worker(clock, 0.005), Worker(clock, 0.005)
    run_until(clock, 1.0, one, other)
    assert set(one.was_alone) == set(other.was_alone) == {False}
    alone = Worker(Clock(), 0.005)
    run_until(alone.clock, 1.0, alone)
    assert set(alone.was_alone) == {True}


def test_the_loop_tells_whether_some_model_has_work() -> None:
    clock = Clock()
    engine = Worker(clock, 0.005)
    seen: list[bool] = []
    loop = EngineLoop(lambda outbox: None, lambda exc: None, clock=clock)

    def look() -> None:
        seen.append(loop.is_busy)
        engine.is_working = False
        loop.call(loop._stop)

    engine.on_step = look
    assert not loop.is_busy
    loop.add(engine)
    loop._run()
    assert seen == [True]


class Started:
    """A loop in its own thread, stopped at the end."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.published: list[Outbox] = []
        self.deaths: list[BaseException] = []
        self.clock = clock or Clock()
        self.loop = EngineLoop(self.published.append, self.deaths.append, clock=self.clock)
        self.loop.start()

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.loop.stop(DEADLINE_S)

    def settle(self) -> None:
        """Returns once all commands so far were carried out."""
        done = threading.Event()
        self.loop.call(done.set)
        assert done.wait(DEADLINE_S)


def test_a_loop_with_nothing_to_do_sleeps_until_a_command_comes() -> None:
    with Started() as started:
        idle, later = Worker(started.clock), Worker(started.clock)
        idle.is_working = later.is_working = False
        later.wake_s = 3600.0
        started.loop.add(idle)
        started.loop.add(later)
        for _ in range(20):
            started.settle()
        # A round for each command, and one more where it went to sleep in between.
        assert later.num_asked <= 2 * 22
        assert idle.num_rests > 0
        assert (later.num_rests, later.num_steps) == (0, 0), "it keeps what it will need again"
        assert started.deaths == []


def test_an_engine_that_waits_is_looked_at_when_its_time_has_come() -> None:
    stepped = threading.Event()

    class Sleeper(Worker):
        """Has work when it is asked for the third time; no command comes meanwhile."""

        @property
        def has_work(self) -> bool:
            self.num_asked += 1
            return self.is_working and self.num_asked > 2

    with Started() as started:
        engine = Sleeper(started.clock)
        engine.wake_s = 0.01

        def has_come() -> None:
            engine.is_working, engine.wake_s = False, None
            stepped.set()

        engine.on_step = has_come
        started.loop.add(engine)
        assert stepped.wait(DEADLINE_S), "nobody looked again"


def test_requests_and_cancellations_reach_their_engine_between_steps_and_are_published() -> None:
    with Started() as started:
        engine = Worker(started.clock)
        engine.is_working = False
        started.loop.add(engine)
        started.loop.cancel(engine, RequestId("r"), None)
        started.settle()
        assert [[d.request_id for d in outbox] for outbox in started.published] == [["r"]]


def test_models_come_and_go_while_others_run() -> None:
    gone = threading.Event()
    with Started() as started:
        stays, leaves = Worker(started.clock, 0.001), Worker(started.clock, 0.001)
        reclaimers: list[KVReclaimer | None] = []

        class Space:
            reclaimer: KVReclaimer | None = None
            is_closed = False

            def close(self) -> None:
                self.is_closed = True

        space = Space()
        leaves.kv_space = cast("KVSpace", space)
        started.loop.add(leaves)
        started.loop.add(stays)
        started.loop.call(lambda: reclaimers.append(space.reclaimer))
        started.settle()
        started.loop.remove(leaves, gone.set)
        assert gone.wait(DEADLINE_S)
        num_steps = leaves.num_steps
        before = stays.num_steps
        while stays.num_steps < before + 10:
            started.settle()
        assert leaves.num_steps == num_steps, "it was touched after it had left"
        assert isinstance(reclaimers[0], KVReclaimer)
        assert space.reclaimer is None
        assert space.is_closed
        newcomer = Worker(started.clock, 0.001)
        started.loop.add(newcomer)
        while newcomer.num_steps < 10:
            started.settle()
        assert len(stays.threads | leaves.threads | newcomer.threads) == 1
        started.loop.remove(Worker(started.clock), gone.set)
        assert started.deaths == []


def test_a_step_that_hangs_shows_how_long_it_has_taken() -> None:
    inside, go_on = threading.Event(), threading.Event()
    with Started() as started:
        engine = Worker(started.clock, 7.0)

        def hang() -> None:
            engine.is_working = False
            inside.set()
            assert go_on.wait(DEADLINE_S)

        engine.on_step = hang
        assert started.loop.stuck_for_s() == 0.0
        started.loop.add(engine)
        assert inside.wait(DEADLINE_S)
        assert started.loop.stuck_for_s() == 7.0
        go_on.set()
        started.settle()
        assert started.loop.stuck_for_s() == 0.0
        assert engine.stats.compute_s == 7.0


def test_a_fault_of_a_command_is_reported_and_ends_the_thread() -> None:
    started = Started()

    def fault() -> None:
        raise ValueError("odd")

    started.loop.call(fault)
    assert started.loop.stop(DEADLINE_S)
    assert [str(exc) for exc in started.deaths] == ["odd"]
    assert not started.loop.is_alive


class Speaker(Worker):
    """Has one token in each step of its list, which says how long the step takes, and whether it does more."""

    def __init__(self, clock: Clock, steps: list[tuple[float, bool]]) -> None:
        super().__init__(clock)
        self.steps = steps

    @property
    def has_work(self) -> bool:
        return self.num_steps < len(self.steps)

    def step(self, outbox: Outbox, *, is_alone: bool = True, before_long: object = None) -> None:
        step_s, is_long = self.steps[self.num_steps]
        if is_long:
            assert callable(before_long)
            before_long()
        self.clock.now_s += step_s
        self.num_steps += 1
        is_last = self.num_steps == len(self.steps)
        outbox.append(
            SequenceDelta(RequestId("r"), text=f"{self.num_steps} ", token_ids=(self.num_steps,), is_last=is_last)
        )


def heard(steps: list[tuple[float, bool]], interval_s: float) -> list[tuple[float, str]]:
    """When each text left, in milliseconds."""
    clock = Clock()
    clock.now_s = 0.0
    told: list[tuple[float, str]] = []

    def publish(outbox: Outbox) -> None:
        told.append((round(clock.now_s * 1000, 3), "".join(delta.text for delta in outbox)))
        if outbox[-1].is_last:
            loop._stop()

    loop = EngineLoop(publish, lambda exc: None, interval_s, clock)
    loop.add(Speaker(clock, steps))
    loop._run()
    return told


def test_tokens_of_fast_steps_leave_together_and_the_end_at_once() -> None:
    fast = [(0.004, False)] * 12
    assert heard(fast, 0.021) == [(4, "1 "), (24, "2 3 4 5 6 "), (44, "7 8 9 10 11 "), (48, "12 ")]
    assert [text for _, text in heard(fast, 0.0)] == [f"{n} " for n in range(1, 13)]


def test_tokens_of_slow_steps_leave_alone() -> None:
    assert heard([(0.015, False)] * 4, 0.02) == [(15, "1 "), (30, "2 "), (45, "3 "), (60, "4 ")]


def test_a_long_step_keeps_no_token_waiting() -> None:
    steps = [(0.004, False), (0.004, False), (0.004, False), (0.1, True), (0.004, False)]
    assert heard(steps, 0.02) == [(4, "1 "), (12, "2 3 "), (112, "4 "), (116, "5 ")]
