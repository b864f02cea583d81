"""What is refused under load: by priority and deadline, with a time to come back, and no more than has to be."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import DeadlineExceeded, Overloaded
from naru_router.core.overload import Refusal, ShedLimits, admit
from naru_router.core.routing.model import RouteRequest, WorkerView
from naru_router.core.routing.route import route
from naru_router.core.start_meter import StartMeter

REQUEST = RouteRequest(b"k", 500)
LIMITS = ShedLimits(max_wait_s=10.0, priority_ratio=2.0)


def busy(*waiting_s: float, **fields: object) -> list[WorkerView]:
    return [
        WorkerView(f"w{i}", waiting_tokens=int(wait_s * 1000), prefill_tokens_per_s=1000.0, **fields)  # type: ignore[arg-type]
        for i, wait_s in enumerate(waiting_s)
    ]


def refusal(views: list[WorkerView], priority: int = 0, remaining_s: float = math.inf) -> Refusal:
    found = admit(views, REQUEST, LIMITS, priority=priority, remaining_s=remaining_s)
    assert found is not None
    return found


def test_the_shortest_queue_counts() -> None:
    assert admit(busy(50.0, 9.0), REQUEST, LIMITS) is None
    assert refusal(busy(50.0, 12.5)).retry_after_s == pytest.approx(2.5)


@pytest.mark.parametrize(("priority", "limit_s"), [(-2, 40.0), (-1, 20.0), (0, 10.0), (1, 5.0), (2, 2.5)])
def test_the_limit_shrinks_with_worse_priority(priority: int, limit_s: float) -> None:
    assert admit(busy(limit_s - 0.1), REQUEST, LIMITS, priority=priority) is None
    assert refusal(busy(limit_s + 3.0), priority).retry_after_s == pytest.approx(3.0)


def test_a_request_that_would_be_late_is_refused_until_it_would_not() -> None:
    assert admit(busy(2.0), REQUEST, LIMITS, remaining_s=2.6) is None
    found = refusal(busy(4.0), remaining_s=2.5)
    assert found.retry_after_s == pytest.approx(2.0)
    later = busy(4.0 - found.retry_after_s)
    assert admit(later, REQUEST, LIMITS, remaining_s=2.5) is None


def test_a_prompt_that_takes_longer_than_there_is_time_is_told_no_time() -> None:
    found = refusal(busy(0.0), remaining_s=0.4)
    assert found.retry_after_s == 0.0
    error = found.error("m")
    assert isinstance(error, DeadlineExceeded)
    assert "0.5 s" in error.message and "more time" in error.message


def test_who_waits_for_a_part_of_the_queue_is_judged_by_that_part() -> None:
    assert admit(busy(50.0), REQUEST, LIMITS) is not None
    assert admit(busy(50.0), REQUEST, LIMITS, share=0.19) is None
    found = admit(busy(50.0), REQUEST, LIMITS, share=0.25)
    assert found is not None and found.retry_after_s == pytest.approx(2.5)
    assert admit(busy(50.0), REQUEST, LIMITS, share=0.04, remaining_s=2.6) is None


def test_the_error_says_when_to_come_back() -> None:
    error = refusal(busy(13.2)).error("m")
    assert isinstance(error, Overloaded) and error.retry_after_s == pytest.approx(3.2)
    assert "'m'" in error.message and "in 4 s" in error.message


def test_nothing_is_refused_where_nothing_is_measured() -> None:
    views = [WorkerView("w", 50, 50, 1_000_000)]
    assert admit(views, REQUEST, LIMITS, remaining_s=0.1) is None
    assert admit([dataclasses.replace(views[0], observed_wait_s=30.0)], REQUEST, LIMITS) is not None


def test_suspect_and_leaving_workers_count_where_no_other_is_there() -> None:
    idle_suspect = dataclasses.replace(busy(0.0)[0], worker_id="s", is_suspect=True)
    assert admit([*busy(30.0), idle_suspect], REQUEST, LIMITS) is not None
    assert admit([idle_suspect], REQUEST, LIMITS) is None


@given(
    st.lists(st.floats(0, 200), min_size=1, max_size=4),
    st.integers(-40, 40),
    st.integers(0, 40),
    st.floats(0.01, 100) | st.just(math.inf),
)
def test_who_is_refused_at_one_priority_is_refused_at_each_worse_one(
    waits_s: list[float], priority: int, worse: int, remaining_s: float
) -> None:
    better, lower = (
        admit(busy(*waits_s), REQUEST, LIMITS, priority=p, remaining_s=remaining_s)
        for p in (priority, priority + worse)
    )
    assert better is None or lower is not None


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=3),
    st.integers(-3, 3),
    st.floats(0.6, 100) | st.just(math.inf),
    st.booleans(),
)
def test_after_the_time_told_and_no_sooner_the_request_is_admitted_if_no_other_came(
    waits_s: list[float], priority: int, remaining_s: float, has_slow: bool
) -> None:
    def look(passed_s: float) -> Refusal | None:
        views = busy(*(max(0.0, wait_s - passed_s) for wait_s in waits_s))
        if has_slow:  # without a queue it takes 2 s
            waiting = int(250 * max(0.0, 30.0 - passed_s))
            views.append(WorkerView("slow", prefill_tokens_per_s=250.0, waiting_tokens=waiting))
        return admit(views, REQUEST, LIMITS, priority=priority, remaining_s=remaining_s)

    found = look(0.0)
    if found is not None:
        assert look(found.retry_after_s + 0.01) is None
        assert found.retry_after_s == 1.0 or look(found.retry_after_s - 0.01) is not None


def test_the_meter_tells_waits_that_tokens_do_not_show() -> None:
    meter = StartMeter()
    assert meter.wait_s == 0.0
    for _ in range(12):
        meter.sent(20, 100.0)
    for number in range(4):
        meter.started(20, 100.5 + number * 0.5)
    assert meter.num_waiting == 8
    # Two starts a second, give or take what older ones weigh less.
    assert meter.wait_s == pytest.approx(4.0, rel=0.1)
    for _ in range(8):
        meter.ended(20, 102.0)
    assert meter.num_waiting == 0 and meter.wait_s == 0.0


def test_a_quiet_hour_is_not_taken_for_a_slow_worker() -> None:
    meter = StartMeter()
    for number in range(10):
        meter.sent(100, number * 3600.0)
        meter.started(100, number * 3600.0 + 0.2)
    meter.sent(100, 40_000.0)
    assert meter.wait_s == pytest.approx(0.2, rel=0.1)


def test_a_burst_of_short_prompts_after_long_ones_is_no_long_queue() -> None:
    meter = StartMeter()
    for number in range(10):
        meter.sent(2000, number * 2.0)
        meter.started(2000, number * 2.0 + 2.0)
    for _ in range(60):
        meter.sent(20, 20.0)
    assert meter.wait_s < 5.0


@dataclass
class Item:
    """One request on its way through the simulation."""

    priority: int
    num_tokens: int
    sent_s: float
    deadline_s: float


class SimWorker:
    """Serves lower priorities first: prompts one after the other, then answers in a limited number of slots."""

    def __init__(self, rate: float, num_slots: int, answer_s: float) -> None:
        self.rate, self.num_slots, self.answer_s = rate, num_slots, answer_s
        self.queue: list[tuple[int, int, Item]] = []
        self.num_answering = 0
        self.is_prefilling = False
        self.meter = StartMeter()

    def view(self, worker_id: str) -> WorkerView:
        waiting = sum(item.num_tokens for _, _, item in self.queue)
        in_flight = len(self.queue) + self.num_answering
        wait_s = self.meter.wait_s
        return WorkerView(worker_id, in_flight, in_flight, waiting, self.rate, 0.0, observed_wait_s=wait_s)


@dataclass
class Outcome:
    """What became of all requests, by priority."""

    offered: Counter[int]
    served: Counter[int]
    late: int
    shed: list[tuple[float, int]]
    admitted: list[tuple[float, int]]


def simulate(
    workers: list[SimWorker], every_s: float, priorities: list[int], num_tokens: int, span_s: float, patience_s: float
) -> Outcome:
    """One request each `every_s`, with priorities in turn; those that wait past their deadline are dropped unserved."""
    result = Outcome(Counter(), Counter(), 0, [], [])
    numbers = itertools.count()
    # (when, number, worker or None for an arrival, what ends there)
    events: list[tuple[float, int, SimWorker | None, Item | None]] = [(0.0, next(numbers), None, None)]

    def pull(worker: SimWorker, now_s: float) -> None:
        while worker.queue and not worker.is_prefilling and worker.num_answering < worker.num_slots:
            item = heapq.heappop(worker.queue)[2]
            if item.deadline_s < now_s:
                worker.meter.ended(item.num_tokens, now_s)
                result.late += 1
                continue
            worker.is_prefilling = True
            worker.num_answering += 1
            heapq.heappush(events, (now_s + item.num_tokens / worker.rate, next(numbers), worker, item))

    while events:
        now_s, number, worker, item = heapq.heappop(events)
        if worker is None:
            priority = priorities[number % len(priorities)]
            result.offered[priority] += 1
            views = [each.view(f"w{i}") for i, each in enumerate(workers)]
            asked = RouteRequest(b"%d" % number, num_tokens, num_virtual_nodes=8)
            if admit(views, asked, LIMITS, priority=priority, remaining_s=patience_s) is None:
                result.admitted.append((now_s, priority))
                worker = workers[int(route(views, asked).worker_id[1:])]
                worker.meter.sent(num_tokens, now_s)
                item = Item(priority, num_tokens, now_s, now_s + patience_s)
                heapq.heappush(worker.queue, (priority, number, item))
                pull(worker, now_s)
            else:
                result.shed.append((now_s, priority))
            if now_s + every_s < span_s:
                heapq.heappush(events, (now_s + every_s, next(numbers), None, None))
        elif item is not None:  # its prompt is computed
            worker.is_prefilling = False
            worker.meter.started(item.num_tokens, now_s)
            if now_s <= item.deadline_s:
                result.served[item.priority] += now_s <= span_s
            else:
                result.late += 1
            heapq.heappush(events, (now_s + worker.answer_s, next(numbers), worker, None))
            pull(worker, now_s)
        else:  # its answer is complete
            worker.num_answering -= 1
            pull(worker, now_s)
    return result


PROMPTS = (1000.0, 1000, 0.0, 500)
"""Prompts take the time: 2 a second on each worker."""
ANSWERS = (1000.0, 8, 4.0, 10)
"""Answers do: 8 slots of 4 s, so 2 a second as well."""


@pytest.mark.parametrize(("rate", "num_slots", "answer_s", "num_tokens"), [PROMPTS, ANSWERS])
def test_three_times_the_load_leaves_nine_tenths_of_capacity_as_goodput(
    rate: float, num_slots: int, answer_s: float, num_tokens: int
) -> None:
    workers = [SimWorker(rate, num_slots, answer_s) for _ in range(2)]
    span_s, capacity = 300.0, 300.0 * 4
    result = simulate(workers, 1 / 12, [0, 0, 1], num_tokens, span_s, patience_s=20.0)
    assert result.served.total() >= 0.9 * capacity
    # What was admitted was worth it.
    assert result.late <= 0.02 * result.served.total()
    # Normal requests alone are twice the capacity: once one of them is shed, no low one gets in.
    first_shed_s = min(at_s for at_s, priority in result.shed if priority == 0)
    assert [at_s for at_s, priority in result.admitted if priority == 1 and at_s > first_shed_s] == []


def test_high_priority_within_capacity_is_served_whole_while_all_else_is_shed_as_needed() -> None:
    workers = [SimWorker(*PROMPTS[:3]) for _ in range(2)]
    result = simulate(workers, 1 / 12, [-1, 0, 0, 0, 1, 1], 500, 300.0, patience_s=30.0)
    assert [at_s for at_s, priority in result.shed if priority == -1] == []
    assert result.served[-1] >= 0.95 * result.offered[-1]
    assert result.served[0] > 0 and result.served.total() >= 0.9 * 1200


def test_a_load_within_capacity_loses_nothing() -> None:
    workers = [SimWorker(*PROMPTS[:3]) for _ in range(2)]
    result = simulate(workers, 1 / 3.6, [0, 1], 500, 300.0, patience_s=20.0)
    assert result.shed == [] and result.late == 0
