"""The KV cache is addresses until it is written, and gives its memory back block by block."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from batches import Lane, batch_of
from memory_models import checkpoint_of, config_of

from naru_proto.errors import InternalError, LoadError
from naru_worker.adapters.ops import cpu
from naru_worker.adapters.ops.cpu import CpuRunner
from naru_worker.adapters.ops.protocol import RunnerOptions

HUGE = 2 * 2**20
CONFIG = config_of(num_layers=8, num_heads=8, num_kv_heads=8, head_dim=64)
OPTIONS = RunnerOptions(16, 400, 64, 4, 64)
BLOCK_BYTES = cpu.kv_block_bytes(CONFIG, OPTIONS)


@pytest.fixture(scope="module")
def runner() -> CpuRunner:
    return cpu.load_runner(checkpoint_of(CONFIG, default="q8_0"), OPTIONS)


def resident_bytes(runner: CpuRunner) -> int:
    """Memory that the KV cache takes now."""
    start = runner._library.naru_kv_base(runner._model)
    end = start + runner._library.naru_kv_bytes(runner._model)
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            first, _, last = head.partition("-")
            inside = int(first, 16) < end and int(last, 16) > start
        elif head == "Rss:" and inside:
            total += int(line.split()[1]) * 1024
    return total


def fill(runner: CpuRunner, first: int, count: int, value: int) -> None:
    base = runner._library.naru_kv_base(runner._model)
    ctypes.memset(base + first * BLOCK_BYTES, value, count * BLOCK_BYTES)


def test_blocks_take_memory_when_written_and_give_it_back_when_released(runner: CpuRunner) -> None:
    assert resident_bytes(runner) == 0
    fill(runner, 0, 100, 1)
    held = resident_bytes(runner)
    assert 100 * BLOCK_BYTES <= held <= 100 * BLOCK_BYTES + HUGE
    runner.release_blocks(40, 60)
    assert resident_bytes(runner) <= 40 * BLOCK_BYTES + HUGE
    fill(runner, 40, 20, 2)
    assert 60 * BLOCK_BYTES <= resident_bytes(runner) <= 60 * BLOCK_BYTES + HUGE
    runner.release_blocks(0, 400)
    assert resident_bytes(runner) == 0


def test_a_block_apart_takes_no_more_than_a_huge_page_beside_it(runner: CpuRunner) -> None:
    fill(runner, 300, 7, 1)
    assert resident_bytes(runner) <= 7 * BLOCK_BYTES + 2 * HUGE
    runner.release_blocks(300, 7)
    assert resident_bytes(runner) < HUGE + 7 * BLOCK_BYTES


def test_a_release_leaves_the_blocks_beside_it_as_they_were(runner: CpuRunner) -> None:
    base = runner._library.naru_kv_base(runner._model)
    fill(runner, 0, 9, 7)
    runner.release_blocks(3, 3)
    kept = ctypes.string_at(base, 9 * BLOCK_BYTES)
    assert kept[: 3 * BLOCK_BYTES] == b"\x07" * (3 * BLOCK_BYTES)
    assert kept[6 * BLOCK_BYTES :] == b"\x07" * (3 * BLOCK_BYTES)
    runner.release_blocks(0, 400)


def test_released_blocks_serve_again(runner: CpuRunner) -> None:
    batch = batch_of([(Lane(list(range(40)), [5, 9, 2]), 40)], 16)
    expected = runner.logits(batch)
    runner.release_blocks(2, 1)
    runner.release_blocks(5, 5)
    np.testing.assert_array_equal(runner.logits(batch), expected)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (399, 2), (0, 401), (5, -1), (400, 1)])
def test_blocks_outside_the_cache_are_refused(runner: CpuRunner, first: int, count: int) -> None:
    with pytest.raises(InternalError, match="outside the 400"):
        runner.release_blocks(first, count)


def test_releasing_no_blocks_is_allowed(runner: CpuRunner) -> None:
    runner.release_blocks(400, 0)


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    options = RunnerOptions(16, 2**26, 64, 4, 64)
    with pytest.raises(LoadError, match="lower num_blocks"):
        cpu.load_runner(checkpoint_of(CONFIG, default="q8_0"), options)
