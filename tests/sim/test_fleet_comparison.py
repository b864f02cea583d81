"""The comparison in small: the same requests for all, the real router near the oracle, and the same figures by seed."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.fleet_sim.comparison import KINDS, NARU, ORACLE, Figures, Scene, capacity_of, compare, run
from bench.fleet_sim.machines import CPU
from bench.fleet_sim.prompts import Message, PromptPress
from bench.fleet_sim.traces import TRACES
from bench.sim.clock import InvariantViolation

ROOT = Path(__file__).parents[2]
SCENE = Scene(CPU, 4, (0.6,))
SMALL = tuple(
    dataclasses.replace(trace, num_requests=240, num_lead_requests=900 if trace.lead_s else 0) for trace in TRACES
)


@functools.cache
def figures() -> dict[tuple[str, str], Figures]:
    return {(row.trace, row.policy): row for row in compare(3, [SCENE], SMALL)}


def test_every_policy_runs_on_every_trace_and_meets_the_same_requests() -> None:
    assert len(figures()) == len(KINDS) * len(SMALL)
    for row in figures().values():
        assert 0.0 <= row.hit_ratio < 1.0
        assert 0.0 < row.ttft_mean_s <= row.ttft_p99_s
        assert row.imbalance >= 1.0
    for trace in SMALL[1:]:  # conversations go on as answers come
        assert len({row.num_requests for row in figures().values() if row.trace == trace.name}) == 1


@pytest.mark.parametrize("trace", ["chats", "shared", "documents"])
def test_naru_is_sooner_than_round_robin_where_prefixes_do_not_fit_everywhere(trace: str) -> None:
    naru, turns = figures()[trace, "Naru"], figures()[trace, "round robin"]
    assert naru.hit_ratio > turns.hit_ratio
    assert naru.ttft_mean_s < turns.ttft_mean_s


def test_round_robin_finds_less_of_a_conversation_than_any_policy_that_follows_prefixes() -> None:
    turns = figures()["chats", "round robin"].hit_ratio
    for name in ("oracle", "Naru", "Naru, hashing alone", "KubeAI", "SGLang"):
        assert figures()["chats", name].hit_ratio > turns


def test_the_oracle_knows_what_a_request_will_find_and_naru_nearly_so() -> None:
    for trace in ("shared", "hot", "documents"):
        assert figures()[trace, "oracle"].prediction_error < 0.02
        assert figures()[trace, "Naru"].prediction_error < 0.05
    assert figures()["hot", "KubeAI"].prediction_error == -1.0


def test_the_same_seed_gives_the_same_requests_in_another_process_whatever_its_hash_seed() -> None:
    program = (
        "from bench.fleet_sim.comparison import *; from bench.fleet_sim.traces import TRACES; import dataclasses\n"
        "trace = dataclasses.replace(TRACES[0], num_requests=60, num_lead_requests=900)\n"
        "for row in compare(5, [Scene(CPU, 3, (0.8,))], [trace]): print(row)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].decode().splitlines()) == len(KINDS)


def test_conversations_come_at_the_rate_their_row_says_from_the_first_second_on() -> None:
    trace = dataclasses.replace(TRACES[0], num_requests=2000, num_lead_requests=900)
    (row,) = compare(3, [SCENE], [trace], [NARU])
    assert row.num_requests > 1000
    assert row.offered_load == pytest.approx(0.6, rel=0.1)


def test_too_few_sessions_for_a_run_are_refused() -> None:
    traffic = SMALL[0].traffic(1, SCENE.num_workers)
    with pytest.raises(InvariantViolation, match="too few"):
        run(SCENE, dataclasses.replace(traffic, lead_s=1e6), NARU, 5.0, 1)


def test_a_fleet_at_its_capacity_is_busy_and_one_above_it_falls_behind() -> None:
    traffic = SMALL[2].traffic(1, SCENE.num_workers)
    capacity = capacity_of(SCENE, traffic, 1)
    waits_s = [
        sum(request.ttft_s for request in run(SCENE, traffic, ORACLE, load * capacity, 1).requests)
        for load in (0.3, 1.0, 2.0)
    ]
    assert waits_s[0] < waits_s[1] < waits_s[2]
    assert waits_s[2] > 4 * waits_s[0]


def test_requests_go_only_where_their_model_is() -> None:
    traffic = SMALL[4].traffic(1, SCENE.num_workers)
    fleet = run(SCENE, traffic, NARU, 5.0, 1)
    assert {len(places) for places in traffic.places.values()} == {2}
    assert all(request.worker in traffic.places[request.prompt.model] for request in fleet.requests)
    assert {request.worker for request in fleet.requests} == {0, 1, 2, 3}


def test_prompts_share_blocks_and_keys_exactly_where_they_share_text() -> None:
    press = PromptPress()
    system = Message("system", "s" * 500)
    one, other = (press.make("chat", [system, Message("user", text * 300)]) for text in "ab")
    shared = len(b"<|system|>\n" + b"s" * 500 + b"\n<|user|>\n")
    same = [a == b for a, b in zip(one.blocks, other.blocks, strict=True)]
    assert sum(same) == shared // 64 and same == sorted(same, reverse=True)
    assert [a == b for a, b in zip(one.keys, other.keys, strict=True)] == same
    assert press.make("other", [system, Message("user", "a" * 300)]).blocks[0] != one.blocks[0]
    assert [press.key_of_block[block] for block in one.key_blocks] == [("chat", key) for key in one.keys]
