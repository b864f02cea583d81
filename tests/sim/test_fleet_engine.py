"""The simulated engine and its cache: times computed by hand, and what must always hold."""

from __future__ import annotations

import random

import pytest
from bench.fleet_sim.cache import PrefixCache
from bench.fleet_sim.engine import Engine
from bench.fleet_sim.machines import Machine
from bench.fleet_sim.policies.naru import KeyStream
from bench.fleet_sim.prompts import BLOCK_TOKENS, Message, PromptPress
from bench.fleet_sim.reports import Report, Reports
from bench.fleet_sim.requests import Request, Turn
from bench.sim.clock import Simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_router.core.prefix_index import PrefixIndex

MACHINE = Machine("test", "", 1000.0, 0.010, 0.001, 100, 4, 10 * 1024)
AROUND_BYTES = len("<|user|>\n\n<|assistant|>\n")


class Bed:
    """One engine and what it tells."""

    def __init__(self, machine: Machine = MACHINE) -> None:
        self.sim = Simulation(0)
        self.press = PromptPress()
        self.ended: list[Request] = []
        self.engine = Engine(self.sim, "worker-0", machine, self.press.key_of_block, lambda _: None, self.ended.append)
        self.requests: list[Request] = []

    def send(self, time_s: float, num_tokens: int, num_answer_tokens: int, letter: str = "x") -> Request:
        text = letter * (num_tokens * 4 - AROUND_BYTES)
        prompt = self.press.make("chat", [Message("user", text)])
        answer_blocks = self.press.blocks_with_answer(prompt, "a" * 4 * num_answer_tokens)
        request = Request(len(self.requests), Turn(prompt, num_answer_tokens, answer_blocks), 0, time_s)
        assert prompt.num_tokens == num_tokens
        self.requests.append(request)
        self.sim.at(time_s, lambda: self.engine.arrive(request))
        return request


def test_a_prompt_is_computed_in_chunks_and_its_answer_follows_token_by_token() -> None:
    bed = Bed()
    request = bed.send(0.0, 250, 5)
    bed.sim.run()
    # Steps of 100, 100 and 50 tokens: 3 x 10 ms + 250 ms; then 4 tokens of 11 ms each.
    assert request.first_token_s == pytest.approx(0.280)
    assert request.ended_s == pytest.approx(0.280 + 4 * 0.011)


def test_a_second_request_joins_the_decodes_at_the_next_step_and_slows_them() -> None:
    bed = Bed()
    first = bed.send(0.0, 50, 11)
    second = bed.send(0.065, 50, 1, "y")
    bed.sim.run()
    # First: 60 ms; decodes of 11 ms from there. The second comes in the first of them, which ends at 71 ms.
    # Its own step: 10 ms + 1 ms for the one that decodes + 50 ms.
    assert second.first_token_s == pytest.approx(0.071 + 0.061)
    assert first.ended_s == pytest.approx(0.132 + 8 * 0.011)


def test_what_one_request_has_computed_the_next_one_finds_but_for_the_last_token() -> None:
    bed = Bed()
    first = bed.send(0.0, 160, 1)
    again = bed.send(1.0, 160, 1)
    bed.sim.run()
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == 144, "of ten whole blocks the last is computed: its last token gives the first"
    assert again.first_token_s - 1.0 == pytest.approx(0.010 + 0.016)


def test_answers_are_cached_and_their_keys_are_told_when_a_prompt_brings_them() -> None:
    bed = Bed()
    first = bed.send(0.0, 64, 64)
    bed.sim.run()
    num_told = len(bed.engine.cache.keys.changes)
    assert num_told == len(first.prompt.keys) == 4
    assert bed.engine.cache.match(first.turn.answer_blocks, 99) == 8


def test_requests_wait_for_a_place_in_the_batch() -> None:
    bed = Bed()
    for index in range(5):
        bed.send(0.0, 16, 100, "abcde"[index])
    bed.sim.run()
    order = sorted(bed.requests, key=lambda request: request.first_token_s)
    assert [request.number for request in order] == [0, 1, 2, 3, 4]
    # The first begins at once: 26 ms. The next three share a step of 48 tokens beside its decode: 59 ms.
    assert order[0].first_token_s == pytest.approx(0.026)
    assert [each.first_token_s for each in order[1:4]] == [pytest.approx(0.085)] * 3
    assert order[4].first_token_s >= order[0].ended_s


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_every_request_ends_and_no_block_is_lost_or_counted_twice(seed: int) -> None:
    rng = random.Random(seed)
    bed = Bed(Machine("small", "", 1000.0, 0.010, 0.001, 64, 3, 64 * BLOCK_TOKENS))
    for _ in range(30):
        bed.send(rng.random() * 5.0, rng.randint(8, 400), rng.randint(1, 60), rng.choice("abc"))
    cache = bed.engine.cache

    def check() -> None:
        assert 0 <= cache.num_private
        assert 0 <= cache.num_held <= cache.num_blocks
        assert bed.engine.num_waiting_tokens >= 0

    bed.sim.after_event = check
    bed.sim.run()
    assert len(bed.ended) == 30
    assert cache.num_held == 0 and bed.engine.num_waiting_tokens == 0
    assert all(r.arrived_s < r.first_token_s <= r.ended_s for r in bed.requests)
    cached: set[int] = set()
    for entered, block in cache.blocks.changes:
        assert (block in cached) != entered
        cached ^= {block}
    assert all(block in cache for block in cached)
    told: set[int] = set()
    for entered, block in cache.keys.changes:
        assert (block in told) != entered
        told ^= {block}
    assert told <= cached
    _check_index(bed, told)


def _check_index(bed: Bed, told: set[int]) -> None:
    """The router's real index, fed from the log in pieces, ends with what the cache has told."""
    index = PrefixIndex()
    stream = KeyStream("worker-0", bed.engine.cache.keys, bed.press.key_of_block, index)
    for time_s in (1.0, 2.5, 1e9):
        stream.read(time_s)
        index.check()
    assert index.num_keys == len(told)
    for request in bed.requests:
        held = [block in told for block in request.prompt.key_blocks]
        expected = held.index(False) if False in held else len(held)
        assert index.match("chat", request.prompt.keys).get("worker-0", 0) == expected


def test_the_longest_unused_prefix_leaves_first_and_from_its_end() -> None:
    cache = PrefixCache(6, {})
    for time_s, blocks in ((1.0, (1, 2, 3)), (2.0, (4, 5, 6))):
        cache.acquire((), 0, 3, time_s)
        cache.release(cache.store(blocks, time_s, is_prompt=True), 0)
    cache.acquire((), 0, 2, 3.0)
    assert [block in cache for block in (1, 2, 3, 4, 5, 6)] == [True, False, False, True, True, True]
    assert not cache.has_room((), 0, 5)
    assert cache.has_room((), 0, 4)


def test_a_block_that_two_computed_is_cached_once() -> None:
    cache = PrefixCache(4, {})
    cache.acquire((), 0, 1, 0.0)
    cache.acquire((), 0, 1, 0.0)
    first, second = (cache.store((7,), 1.0, is_prompt=True) for _ in range(2))
    assert (first, second) == ([7], [])
    assert cache.num_held == 2
    cache.release(first, 0)
    cache.release(second, 1)
    assert cache.num_held == 0 and 7 in cache


def test_a_report_is_read_as_late_as_it_comes() -> None:
    reports = Reports()
    for time_s in (1.0, 2.0, 2.0):
        reports.add(
            Report(time_s, int(time_s), 0, 100, 50.0, 0.0, 0.0, 0.0, (((0, "a"), 2), ((1, "a"), 3), ((1, "b"), 4)))
        )
    assert [reports.at(time_s).num_running for time_s in (0.5, 1.0, 1.9, 2.0, 9.0)] == [0, 1, 1, 2, 2]
    newest = reports.at(9.0)
    assert newest.waiting_tokens_at(3.0) == 50.0
    assert newest.waiting_tokens_at(9.0) == 0.0
    assert newest.alive_of_others(0) == 7
    assert newest.alive_of_others(0, "b") == 4
