from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
from bench.hub_memory import (
    MemoryTally,
    Rss,
    booked_bytes,
    children_of,
    high_water_mark,
    read_rss,
    reset_high_water_mark,
)
from bench.hub_probe import difference
from bench.hub_worker import HubWorkerError

from naru_proto.v1 import worker_pb2

MB = 10**6


def books(
    weights: int = 0, kv: int = 0, workspace: int = 0, private: int = 0, unreturned: int = 0
) -> worker_pb2.MemoryStats:
    return worker_pb2.MemoryStats(
        budget_bytes=10**9,
        weight_bytes=weights,
        kv_bytes=kv,
        workspace_bytes=workspace,
        private_bytes=private,
        unreturned_bytes=unreturned,
    )


def test_everything_that_counts_against_the_budget_is_summed() -> None:
    assert booked_bytes(books(1, 20, 300, 4000, 50000)) == 54321


def test_bookings_up_to_the_budget_are_no_violation_and_one_byte_more_is() -> None:
    tally = MemoryTally(budget_bytes=1000, host_budget_bytes=500)
    tally.add_books(books(weights=900, kv=100))
    assert tally.num_violations == 0
    tally.add_books(books(weights=900, kv=100, private=1))
    assert (tally.num_books_violations, tally.num_violations) == (1, 1)
    tally.add_books(books(weights=10))
    assert tally.booked_peak_bytes == 1001
    assert tally.booked_peak_parts == {
        "weight_bytes": 900,
        "kv_bytes": 100,
        "workspace_bytes": 0,
        "private_bytes": 1,
        "unreturned_bytes": 0,
    }


def test_rss_may_be_both_budgets_and_the_allowance_and_not_more() -> None:
    tally = MemoryTally(budget_bytes=1000 * MB, host_budget_bytes=200 * MB)
    tally.add_rss(Rss(1350 * MB, 900 * MB))
    assert tally.num_violations == 0
    tally.add_rss(Rss(1350 * MB + 1, 1000 * MB))
    tally.add_rss(Rss(1100 * MB, 1100 * MB))
    assert (tally.num_rss_violations, tally.num_violations, tally.num_rss_samples) == (1, 1, 3)
    assert tally.rss_over_budget_mb == pytest.approx(150)
    assert tally.rss_peak_mapped_bytes == 1000 * MB


def test_a_tally_is_written_with_its_limit() -> None:
    written = MemoryTally(budget_bytes=1, host_budget_bytes=2, rss_allowance_bytes=3).as_dict()
    assert (written["rss_limit_bytes"], written["num_violations"], written["budget_bytes"]) == (6, 0, 1)


def test_rss_and_the_kernels_high_water_mark_see_pages_that_come_and_go() -> None:
    size = 64 * MB
    reset_high_water_mark(os.getpid())
    before = read_rss(os.getpid()).all_bytes
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.write(b"x" * size)
        during = read_rss(os.getpid()).all_bytes
    assert during - before > 0.9 * size
    assert high_water_mark(os.getpid()) >= during - MB
    reset_high_water_mark(os.getpid())
    assert high_water_mark(os.getpid()) < during


def test_child_processes_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        assert child.pid in children_of(os.getpid())
    finally:
        child.kill()
        child.wait()
    assert child.pid not in children_of(os.getpid())


def test_a_budget_holds_exactly_so_many_models_by_what_the_second_one_cost() -> None:
    found = difference(books(100, 5, workspace=20), books(200, 10, workspace=20))
    assert (found.per_model_bytes, found.shared_bytes) == (105, 20)
    assert (found.weight_bytes, found.kv_floor_bytes) == (100, 5)
    assert found.budget_bytes(10) == 1070


@pytest.mark.parametrize(
    ("one", "two"),
    [
        pytest.param(books(100), books(100), id="the second is free"),
        pytest.param(books(100), books(300), id="the second costs more than the first"),
    ],
)
def test_bookings_that_make_no_sense_give_no_budget(one: worker_pb2.MemoryStats, two: worker_pb2.MemoryStats) -> None:
    with pytest.raises(HubWorkerError, match="no budget can be made"):
        difference(one, two)
