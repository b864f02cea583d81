"""Any interleaving of arrival, step, cancellation, fault and weights that are late, in memory that comes and goes.

One end for each request, all blocks back, and survivors as if alone.
"""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from launching_toy import LaunchingToy
from toy_model import ToyRunner, toy_engine

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.memory.kv_space import KVSpace
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.ops.protocol import BatchInputs, WeightsPending
from naru_worker.core.kv_growth import KVLayout
from naru_worker.core.request import Request, RequestId
from naru_worker.core.sampling import SamplingParams

PROMPTS = ("a", "shared beginning of a prompt", "shared beginning of a prompt, and more of it", "something else")

requests = st.tuples(
    st.just("submit"),
    st.sampled_from(PROMPTS),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 14),
            "n": st.integers(1, 3),
            "temperature": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
            # With two letters to choose from, a text repeats itself, and guesses are right now and then.
            "logit_bias": st.sampled_from([(), ((97, 20.0), (98, 20.0))]),
        },
        optional={"stop": st.just(("e", "xy")), "prompt_logprobs": st.just(1), "min_tokens": st.integers(0, 1)},
    ),
)
acts = st.lists(
    st.one_of(
        requests,
        requests,
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("fault")),
        st.tuples(st.just("late"), st.integers(1, 4)),
        st.tuples(st.just("others"), st.integers(0, 8)),
        st.tuples(st.just("trim"), st.integers(1, 8)),
    ),
    max_size=24,
)


def make(number: int, prompt: str, params: dict[str, object]) -> Request:
    given_ = dict(params)
    given_["min_tokens"] = min(int(str(given_.get("min_tokens", 0))), int(str(given_["max_tokens"])))
    sampling = SamplingParams(seed=number, **given_)  # type: ignore[arg-type]
    return Request(RequestId(str(number)), tuple(prompt.encode()), sampling, number, number)


def output(deltas: list[SequenceDelta]) -> dict[int, tuple[tuple[int, ...], str]]:
    """Token ids and text of each choice."""
    out: dict[int, tuple[tuple[int, ...], str]] = {}
    for delta in deltas:
        ids, text = out.get(delta.index, ((), ""))
        out[delta.index] = (ids + delta.token_ids, text + delta.text)
    return out


def fail_once(runner: ToyRunner) -> None:
    def fail(batch: BatchInputs) -> None:
        runner.before_step = lambda batch: None
        raise RuntimeError("fault")

    runner.before_step = fail


def be_late(runner: ToyRunner, num_times: int) -> None:
    """The weights are there after so many tries."""
    left = itertools.count(num_times, -1)

    def wait(batch: BatchInputs) -> None:
        if next(left) > 0:
            raise WeightsPending
        runner.before_step = lambda batch: None

    runner.before_step = wait


@settings(max_examples=100, deadline=None)
@given(acts, st.booleans(), st.sampled_from([0, 2, 8]))
def test_every_request_ends_once_and_nothing_is_lost(
    script: list[tuple[object, ...]], grows: bool, max_draft_tokens: int
) -> None:
    play(script, grows, max_draft_tokens, ToyRunner)


@settings(max_examples=100, deadline=None)
@given(acts, st.booleans())
def test_steps_ahead_change_no_token_and_give_no_block_away_that_is_written_to(
    script: list[tuple[object, ...]], grows: bool
) -> None:
    play(script, grows, 0, LaunchingToy)


def play(script: list[tuple[object, ...]], grows: bool, max_draft_tokens: int, make_runner: type[ToyRunner]) -> None:
    # Chunks of 3 blocks, a byte each; the budget has room for all of them while nobody else takes any.
    ledger = MemoryLedger(39, soft_ratio=0.8)
    layout = KVLayout(3, 3, 12, 2, 3)
    assert ledger.book_kv("toy", layout.floor_bytes)
    ticks = itertools.count()
    engine, runner, scheduler = toy_engine(
        num_blocks=36,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        clock=lambda: next(ticks) / 100,
        make_space=(lambda runner: KVSpace("toy", ledger, runner, layout)) if grows else None,
        memory_wait_s=1e9,
        max_draft_tokens=max_draft_tokens,
        make_runner=make_runner,
    )
    outbox: list[SequenceDelta] = []
    submitted: list[tuple[str, dict[str, object]]] = []
    cancelled: set[str] = set()
    num_faults = 0
    for act in script:
        if act[0] == "submit":
            _, prompt, params = act
            submitted.append((prompt, params))  # type: ignore[arg-type]
            engine.submit(make(len(submitted) - 1, *submitted[-1]), 0.0, outbox)
        elif act[0] == "step":
            for _ in range(int(str(act[1]))):
                if engine.has_work:
                    engine.step(outbox)
        elif act[0] == "cancel":
            cancelled.add(str(act[1]))
            engine.cancel(RequestId(str(act[1])), None, outbox)
        elif act[0] == "late":
            be_late(runner, int(str(act[1])))
        elif act[0] == "others":
            ledger.unbook("others")
            ledger.book("others", 3 * int(str(act[1])))
        elif act[0] == "trim":
            engine.trim_kv(3 * int(str(act[1])))
        else:
            num_faults += 1
            fail_once(runner)
        if engine._held is None:  # the invariants of blocks are those between two steps
            scheduler.check()
        for flight in runner.flights if isinstance(runner, LaunchingToy) else ():
            blocks = [scheduler.kv._pool.blocks[block] for block in flight.writers(4)]
            assert all(block.ref_count for block in blocks), "a block that is written to is free"
        if grows:
            assert ledger.kv_bytes("toy") == engine.kv_committed_bytes == engine.stats.kv_committed_bytes
    ledger.unbook("others")
    while engine.has_work or engine.wake_s is not None:
        engine.step(outbox)
    assert engine.stats.num_failed_steps <= num_faults
    assert engine.kv_stats().num_used_blocks == 0
    assert not isinstance(runner, LaunchingToy) or not runner.flights
    assert not scheduler.kv.is_in_flight
    assert scheduler.num_requests == 0
    assert not engine._outputs
    assert not engine._sampling
    for number, (prompt, params) in enumerate(submitted):
        deltas = [d for d in outbox if d.request_id == str(number)]
        assert [d.is_last for d in deltas].count(True) == 1
        assert deltas[-1].is_last
        assert (deltas[-1].error is None) != (deltas[-1].usage is None)
        if deltas[-1].error is None and str(number) not in cancelled:
            alone, _, _ = toy_engine()
            solo: list[SequenceDelta] = []
            alone.submit(make(number, prompt, params), 0.0, solo)
            while alone.has_work:
                alone.step(solo)
            assert output(deltas) == output(solo)
