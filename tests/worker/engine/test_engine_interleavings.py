"""Any interleaving of arrival, step, cancellation and fault: one end each, all blocks back, survivors as if alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyRunner, toy_engine

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.ops.protocol import BatchInputs
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


@settings(max_examples=80, deadline=None)
@given(acts)
def test_every_request_ends_once_and_nothing_is_lost(script: list[tuple[object, ...]]) -> None:
    engine, runner, scheduler = toy_engine(num_blocks=36, max_num_seqs=4, max_num_batched_tokens=24)
    outbox: list[SequenceDelta] = []
    submitted: list[tuple[str, dict[str, object]]] = []
    cancelled: set[str] = set()
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
        else:
            fail_once(runner)
        scheduler.check()
    while engine.has_work:
        engine.step(outbox)
    assert engine.kv_stats().num_used_blocks == 0
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
