"""The hub in ten thousand random scenarios: what must always hold is checked after each of their events."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from bench.sim.requests import Outcome
from bench.sim.scenario import Report, draw_scenario, run_scenario, scenario_of
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
NUM_SCENARIOS = 10_000
BATCH = 1_000


def run_seed(seed: int) -> Report:
    try:
        return run_scenario(scenario_of(seed))
    except Exception as error:
        error.add_note(f"to see it: python -m bench.sim --scenario {seed}")
        raise


@pytest.mark.parametrize("first", range(0, NUM_SCENARIOS, BATCH))
def test_budget_drains_and_ends_hold_in_a_thousand_random_scenarios(first: int) -> None:
    reports = [run_seed(seed) for seed in range(first, first + BATCH)]
    assert len(reports) == BATCH
    outcomes = sum((Counter(report.outcomes) for report in reports), Counter[Outcome]())
    assert min(outcomes[outcome] for outcome in Outcome) > BATCH, "scenarios have come to exercise little"
    assert sum(report.num_loads for report in reports) > BATCH
    assert sum(report.num_evictions for report in reports) > BATCH
    assert sum(report.num_restarts for report in reports) > BATCH / 10


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False, note_method_calls=False))
def test_they_hold_whatever_the_scenario_is_made_of(rng: random.Random) -> None:
    scenario = draw_scenario(rng)
    note(repr(scenario))
    run_scenario(scenario)


def test_the_same_seed_gives_the_same_trace() -> None:
    for seed in range(100):
        first, second = (run_scenario(scenario_of(seed), keep_trace=True) for _ in range(2))
        assert first == second
        assert len(first.trace) >= first.num_events


def test_the_trace_is_the_same_in_another_process_whatever_its_hash_seed() -> None:
    traces = [
        subprocess.run(
            [sys.executable, "-m", "bench.sim", "--scenario", "11"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].decode().splitlines() == list(run_scenario(scenario_of(11), keep_trace=True).trace)
