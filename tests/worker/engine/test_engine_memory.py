"""Engines of several models in one budget: their KV caches grow, give way and wait, and no answer changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from toy_model import ToyRunner, toy_engine

from naru_proto.errors import Overloaded
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.memory.kv_space import KVReclaimer, KVSpace
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.core.kv_growth import KVLayout
from naru_worker.core.request import Request, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler import Scheduler

CHUNK = 4
"""Blocks of a chunk; a block is a byte, and 4 tokens."""
WAIT_S = 10.0


def request(name: str, num_prompt_tokens: int, max_tokens: int = 4, *, letter: str = "a", arrival: int = 0) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(RequestId(name), tuple(letter.encode() * num_prompt_tokens), params, 7, arrival)


@dataclass
class Models:
    """Engines that share a budget, and their clock."""

    num_chunks: int
    names: tuple[str, ...]
    max_chunks: int = 10
    now_s: float = 0.0
    outbox: list[SequenceDelta] = field(default_factory=list)
    engines: dict[str, ModelEngine] = field(default_factory=dict)
    runners: dict[str, ToyRunner] = field(default_factory=dict)
    schedulers: dict[str, Scheduler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.num_chunks * CHUNK)
        self.reclaimer = KVReclaimer()
        layout = KVLayout(CHUNK, CHUNK, self.max_chunks, 1, CHUNK)
        for name in self.names:
            assert self.ledger.book_kv(name, layout.floor_bytes)

            def make_space(runner: ToyRunner, name: str = name) -> KVSpace:
                return KVSpace(name, self.ledger, runner, layout)

            self.engines[name], self.runners[name], self.schedulers[name] = toy_engine(
                self.max_chunks * CHUNK,
                clock=lambda: self.now_s,
                revision=name,
                make_space=make_space,
                memory_wait_s=WAIT_S,
            )
            space = self.engines[name].kv_space
            assert space is not None
            self.reclaimer.add(space)

    def submit(self, name: str, item: Request) -> None:
        self.engines[name].submit(item, self.now_s, self.outbox)

    def step(self) -> None:
        """A turn for each engine with work; a millisecond passes."""
        for name, engine in self.engines.items():
            if engine.has_work:
                engine.step(self.outbox)
                self.schedulers[name].check()
            assert self.ledger.kv_bytes(name) == engine.kv_committed_bytes == engine.stats.kv_committed_bytes
        assert self.ledger.free_bytes() >= 0
        self.now_s += 0.001

    def finish(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not any(engine.has_work or engine.wake_s is not None for engine in self.engines.values()):
                return
            self.step()
        raise AssertionError("the engines do not come to an end")

    def last(self, request_id: str) -> SequenceDelta:
        (last,) = [d for d in self.outbox if d.request_id == request_id and d.is_last]
        return last

    def token_ids(self, request_id: str) -> list[int]:
        assert self.last(request_id).error is None
        return [token_id for d in self.outbox if d.request_id == request_id for token_id in d.token_ids]


def solo(name: str, item: Request) -> list[int]:
    engine, _, _ = toy_engine(revision=name)
    outbox: list[SequenceDelta] = []
    engine.submit(item, 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
    return [token_id for d in outbox for token_id in d.token_ids]


def test_a_cache_grows_with_demand_and_its_numbers_say_so() -> None:
    models = Models(10, ("a",))
    engine = models.engines["a"]
    assert (engine.stats.num_blocks, engine.stats.num_free_blocks) == (39, 39)
    assert (engine.kv_committed_bytes, engine.stats.kv_usage_ratio) == (CHUNK, 0.0)
    models.submit("a", request("r", 40, 4))
    models.step()
    # 40 tokens are 10 blocks; with the null block they are in three chunks.
    assert (engine.kv_committed_bytes, engine.stats.num_free_blocks) == (3 * CHUNK, 29)
    assert engine.stats.num_kv_grows == 1
    assert engine.stats.kv_usage_ratio == pytest.approx(10 / 39)
    kv = engine.kv_stats()
    assert (kv.num_blocks, kv.num_used_blocks, kv.num_free_blocks, kv.num_committed_blocks) == (39, 10, 29, 11)
    models.finish()
    assert models.token_ids("r") == solo("a", request("r", 40, 4))
    assert engine.trim_kv(1 << 30) == 2 * CHUNK
    assert (engine.stats.num_kv_shrinks, engine.stats.kv_committed_bytes) == (1, CHUNK)
    assert engine.stats.num_free_blocks == 39


def test_an_idle_model_keeps_its_prefixes_until_another_one_needs_the_memory() -> None:
    models = Models(8, ("idle", "busy"))
    models.submit("idle", request("first", 80, 1))
    models.finish()
    assert models.engines["idle"].kv_committed_bytes == 6 * CHUNK
    models.submit("idle", request("again", 80, 1))
    models.finish()
    assert models.last("again").usage is not None
    assert models.outbox[-1].cached_tokens == 79
    models.submit("busy", request("large", 60, 1, letter="b"))
    models.finish()
    # 15 blocks and the null block: 4 chunks, of which the budget had two left.
    assert models.engines["busy"].kv_committed_bytes == 4 * CHUNK
    assert models.engines["idle"].kv_committed_bytes == 4 * CHUNK
    assert models.engines["idle"].stats.num_kv_shrinks == 1
    models.submit("idle", request("third", 80, 1))
    models.finish()
    for name, item in (("idle", request("third", 80, 1)), ("busy", request("large", 60, 1, letter="b"))):
        assert models.token_ids(item.request_id) == solo(name, item)


def test_a_request_waits_for_memory_that_others_hold_and_is_served_when_it_is_free() -> None:
    models = Models(4, ("a", "b"))
    models.submit("a", request("long", 36, 8))
    models.step()
    models.submit("b", request("waits", 20, 2))
    models.step()
    engine = models.engines["b"]
    assert not engine.has_work, "a step would do nothing"
    assert engine.wake_s is not None
    assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 1)
    models.finish()
    for name, item in (("a", request("long", 36, 8)), ("b", request("waits", 20, 2))):
        assert models.token_ids(item.request_id) == solo(name, item)
    assert engine.wake_s is None
    assert models.now_s < WAIT_S


def test_it_looks_again_soon_after_memory_was_given_back_anywhere() -> None:
    models = Models(4, ("a",))
    assert models.ledger.book("weights", 3 * CHUNK)
    models.submit("a", request("r", 20, 2))
    models.step()
    engine = models.engines["a"]
    assert not engine.has_work
    models.now_s += 0.005
    assert not engine.has_work
    models.ledger.unbook("weights")
    assert engine.has_work
    models.finish()
    assert models.token_ids("r") == solo("a", request("r", 20, 2))


def test_a_request_that_waits_for_memory_too_long_ends_with_a_clear_error_and_the_next_is_served() -> None:
    models = Models(4, ("a",))
    assert models.ledger.book("weights", 3 * CHUNK)
    models.submit("a", request("large", 20, 2))
    models.submit("a", request("small", 4, 2, letter="b", arrival=1))
    models.finish(max_steps=20_000)
    error = models.last("large").error
    assert isinstance(error, Overloaded)
    assert error.retryable
    assert "10 s" in error.message
    assert WAIT_S <= models.now_s < WAIT_S + 0.1
    assert models.token_ids("small") == solo("a", request("small", 4, 2, letter="b"))
    assert models.engines["a"].stats.finished == {"error": 1, "length": 1}


def test_one_that_came_later_waits_its_own_full_time() -> None:
    models = Models(4, ("a",))
    assert models.ledger.book("weights", 3 * CHUNK)
    models.submit("a", request("first", 20, 2))
    models.step()
    models.now_s = 6.0
    models.submit("a", request("second", 24, 2, letter="b", arrival=1))
    ends: dict[str, float] = {}
    while models.engines["a"].wake_s is not None:
        models.step()
        ends.update({str(d.request_id): models.now_s for d in models.outbox if d.is_last and d.request_id not in ends})
    assert ends["first"] == pytest.approx(WAIT_S, abs=0.1)
    assert ends["second"] == pytest.approx(6.0 + WAIT_S, abs=0.1)


def test_a_sequence_that_outgrows_what_it_gets_lets_others_have_its_memory_and_goes_on_later() -> None:
    models = Models(4, ("a", "b"))
    # Each needs three of the four chunks in the end, and one of the other's is floor.
    for name in ("a", "b"):
        models.submit(name, request(name, 4, 36))
    models.finish(max_steps=20_000)
    for name in ("a", "b"):
        assert models.token_ids(name) == solo(name, request(name, 4, 36))
    assert sum(engine.stats.num_preemptions for engine in models.engines.values()) > 0
    assert models.now_s < WAIT_S


def test_one_that_waits_for_memory_can_be_cancelled_and_leaves_nothing() -> None:
    models = Models(4, ("a",))
    assert models.ledger.book("weights", 3 * CHUNK)
    models.submit("a", request("r", 20, 2))
    models.step()
    engine = models.engines["a"]
    models.submit("a", request("next", 24, 2, arrival=1))
    engine.cancel(RequestId("r"), None, models.outbox)
    assert models.last("r").usage is not None
    assert engine.has_work, "who waits behind it is tried at once"
    models.step()
    engine.cancel(RequestId("next"), None, models.outbox)
    assert (engine.has_work, engine.wake_s) == (False, None)
    assert engine.stats.num_waiting == 0


def test_of_two_idle_models_the_one_not_used_for_longest_gives_way() -> None:
    models = Models(7, ("a", "b", "asker"))
    for name in ("a", "b", "a"):
        models.submit(name, request(f"{name}{models.now_s}", 28, 1))
        models.finish()
        models.now_s += 1.0
    assert models.ledger.free_bytes() == 2 * CHUNK
    models.submit("asker", request("r", 60, 1))
    models.finish()
    assert [models.engines[name].kv_committed_bytes for name in ("a", "b", "asker")] == [2 * CHUNK, CHUNK, 4 * CHUNK]


def test_attempts_in_vain_cost_no_other_model_its_prefixes() -> None:
    """Two models wait for more than there can be; what a third one keeps is not enough, and so is not taken."""
    models = Models(6, ("a", "b", "idle"))
    models.submit("idle", request("kept", 16, 1))
    models.finish()
    assert models.engines["idle"].kv_committed_bytes == 2 * CHUNK
    for name in ("a", "b"):
        models.submit(name, request(name, 70, 1))
    for _ in range(200):
        models.step()
    assert models.engines["idle"].kv_committed_bytes == 2 * CHUNK
    shrinks = [engine.stats.num_kv_shrinks for engine in models.engines.values()]
    assert sum(shrinks) <= 1, "they take from each other again and again"


def test_a_space_that_is_not_the_growth_of_the_engine_is_refused() -> None:
    models = Models(4, ("a",))
    engine = models.engines["a"]
    with pytest.raises(ValueError, match="grows elsewhere"):
        other, _, scheduler = toy_engine()
        ModelEngine(scheduler, other._runner, models.runners["a"].options, other._tokens, 258, kv_space=engine.kv_space)
