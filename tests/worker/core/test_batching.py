"""Which inputs run together, and when: nothing is lost, and nobody is kept waiting beside an idle engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.batching import BatchItem, BatchLimits, BatchQueue, plan_batch


def item(
    key: int, *, priority: int = 0, since_s: float = 0.0, size: int = 1, rows: int = 1, group: str = ""
) -> BatchItem:
    return BatchItem(key, (priority, key), since_s, size, rows, group)


def keys(items: tuple[BatchItem, ...]) -> list[int]:
    return [each.key for each in items]


def test_the_first_waits_for_more_and_no_longer_than_its_delay() -> None:
    queue = BatchQueue(BatchLimits(4, 0.5))
    assert queue.due_s is None
    queue.add(item(1, since_s=10.0))
    queue.add(item(2, since_s=10.4))
    assert queue.due_s == 10.5
    assert queue.plan(10.49).items == ()
    assert queue.plan(10.49).look_s == 10.5
    assert keys(queue.plan(10.5).items) == [1, 2]


def test_a_full_batch_does_not_wait() -> None:
    queue = BatchQueue(BatchLimits(2, 60.0))
    queue.add(item(1))
    queue.add(item(2))
    assert queue.due_s == -math.inf
    assert keys(queue.plan(0.0).items) == [1, 2]


def test_tokens_fill_a_batch_as_rows_do_and_one_input_may_have_more() -> None:
    limits = BatchLimits(8, 60.0, max_size=10)
    assert keys(plan_batch([item(1, size=6), item(2, size=6)], 0.0, limits, 0.0).items) == [1]
    assert keys(plan_batch([item(1, size=50)], 0.0, limits, 0.0).items) == [1]


def test_a_preferred_number_of_rows_does_not_wait_and_the_rest_does() -> None:
    limits = BatchLimits(8, 60.0, preferred_rows=(2, 4))
    waiting = [item(key) for key in range(5)]
    assert keys(plan_batch(waiting, 0.0, limits, 0.0).items) == [0, 1, 2, 3]
    assert plan_batch(waiting[:1], 0.0, limits, 0.0).items == ()


def test_only_inputs_of_one_shape_share_a_batch() -> None:
    waiting = [item(1, group="a"), item(2, group="b"), item(3, group="a")]
    assert keys(plan_batch(waiting, 0.0, BatchLimits(8, 0.0), 0.0).items) == [1, 3]


def test_beside_the_first_come_those_of_its_length() -> None:
    sizes = [10, 500, 11, 480, 12, 510, 9, 490]
    waiting = [item(key, size=size) for key, size in enumerate(sizes)]
    assert keys(plan_batch(waiting, 0.0, BatchLimits(4, 0.0, window=2), 0.0).items) == [0, 2, 4, 6]
    assert keys(plan_batch(waiting, 0.0, BatchLimits(4, 0.0), 0.0).items) == [0, 1, 2, 3]


def test_length_never_beats_priority() -> None:
    waiting = [item(1, size=10), item(2, size=900), item(3, priority=1, size=10), item(4, priority=1, size=10)]
    assert keys(plan_batch(waiting, 0.0, BatchLimits(2, 0.0, window=4), 0.0).items) == [1, 2]


@dataclass(frozen=True)
class Event:
    """After `gap_s`, an input comes, or an earlier one (by place) is wanted no more."""

    gap_s: float
    cancels: int | None
    priority: int
    size: int
    rows: int
    group: str


EVENTS = st.lists(
    st.builds(
        Event,
        gap_s=st.sampled_from([0.0, 0.25, 1.0]),
        cancels=st.none() | st.none() | st.integers(0, 20),
        priority=st.integers(0, 2),
        size=st.integers(1, 12),
        rows=st.integers(1, 3),
        group=st.sampled_from(["a", "b"]),
    ),
    max_size=40,
)
LIMITS = st.builds(
    BatchLimits,
    max_rows=st.integers(3, 6),
    max_delay_s=st.sampled_from([0.0, 0.5, 2.0]),
    max_size=st.sampled_from([0, 15]),
    preferred_rows=st.sampled_from([(), (2,), (3, 5)]),
    window=st.integers(1, 3),
)


@given(EVENTS, LIMITS, st.sampled_from([0.125, 1.0]))
def test_nothing_is_lost_and_nobody_waits_beside_an_idle_engine(
    events: list[Event], limits: BatchLimits, run_s: float
) -> None:
    """A simulated engine: batches take `run_s`; between them it looks whenever something comes or is due."""
    queue = BatchQueue(limits)
    now_s = free_s = 0.0
    come: dict[int, BatchItem] = {}
    gone: set[int] = set()
    ran: dict[int, float] = {}

    def look(until_s: float) -> None:
        nonlocal free_s, now_s
        while True:
            due_s = queue.due_s
            start_s = math.inf if due_s is None else max(now_s, free_s, due_s)
            if start_s == math.inf or start_s > until_s:
                now_s = max(now_s, until_s) if until_s < math.inf else now_s
                return
            now_s = start_s
            batch = queue.plan(now_s).items
            assert batch, "it is due, and nothing runs"
            first = queue.first
            assert first in batch, "the first in line is part of every batch"
            assert len({each.group for each in batch}) == 1
            assert len(batch) == 1 or sum(each.rows for each in batch) <= limits.max_rows
            assert len(batch) == 1 or not limits.max_size or sum(each.size for each in batch) <= limits.max_size
            _check_order(batch, list(queue), limits)
            for each in batch:
                assert queue.remove(each.key) is each
                ran[each.key] = now_s
            free_s = now_s + run_s

    for key, event in enumerate(events):
        look(now_s + event.gap_s)
        if event.cancels is not None:
            if event.cancels in come and queue.remove(event.cancels) is not None:
                gone.add(event.cancels)
            continue
        # While it runs, what comes is seen when the batch is over: arrivals are counted from the time they came.
        come[key] = item(
            key, priority=event.priority, since_s=now_s, size=event.size, rows=event.rows, group=event.group
        )
        queue.add(come[key])
    look(math.inf)
    assert len(queue) == 0
    assert queue.total_size == 0
    assert ran.keys() | gone == come.keys()
    assert not ran.keys() & gone
    _check_waits(come, ran, gone, limits, run_s)


def _check_order(batch: tuple[BatchItem, ...], waiting: list[BatchItem], limits: BatchLimits) -> None:
    """Whoever is passed over is of another shape, or is passed by less than a few batches' worth."""
    chosen = {each.key for each in batch}
    last = max(each.rank for each in batch)
    passed = [each for each in waiting if each.key not in chosen and each.group == batch[0].group and each.rank < last]
    assert all(each.rank[0] == batch[0].rank[0] for each in passed), "priority comes first"
    if limits.window == 1:
        assert not passed, "strictly in order"
    ahead = [each for each in waiting if each.group == batch[0].group and each.rank < last]
    assert sum(each.rows for each in ahead) <= limits.max_rows * limits.window


def _check_waits(
    come: dict[int, BatchItem], ran: dict[int, float], gone: set[int], limits: BatchLimits, run_s: float
) -> None:
    """An input that waits longer than its delay does so while batches run one after the other, without a gap."""
    starts = sorted(set(ran.values()))
    for key, start_s in ran.items():
        due_s = come[key].since_s + limits.max_delay_s
        if start_s <= due_s:
            continue
        covering = [s for s in starts if s < start_s and s + run_s > due_s]
        at_s = due_s
        for s in covering:
            assert s <= at_s, f"{key} waited from {at_s} to {s} beside an idle engine"
            at_s = s + run_s
        assert start_s <= at_s, f"{key} waited from {at_s} to {start_s} beside an idle engine"
