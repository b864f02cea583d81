"""How long a step may be: for streams, for prompts that outnumber them, alone, and before anything was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.step_budget import ALONE_STEP_S, FIRST_TOKENS, LEAST_TOKENS, StepPace, step_budget
from naru_worker.core.testing_engine import PretendEngine


def config(most: int = 2048, target_itl_s: float = 0.1) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=most, max_model_len=4096, target_itl_s=target_itl_s)


@pytest.mark.parametrize(
    ("pace", "num_decodes", "num_prompts", "expected"),
    [
        (None, 3, 1, 2048),
        (StepPace(), 3, 1, 3 + FIRST_TOKENS),
        (StepPace(3000.0), 0, 1, 1024),
        (StepPace(9000.0), 0, 1, 2048),
        (StepPace(5000.0, is_shared=True), 0, 1, 448),
        (StepPace(5000.0, 0.01), 8, 1, 8 + 448),
        (StepPace(3000.0, 0.01), 1, 15, 1 + 1024),
        (StepPace(5000.0, 0.01, is_shared=True), 1, 15, 1 + 448),
        (StepPace(5000.0, 0.01), 8, 16, 8 + 512),
        (StepPace(1000.0, 0.5), 8, 1, 8 + 448),
        (StepPace(20.0, 0.3), 2, 1, 2 + LEAST_TOKENS),
    ],
    ids=[
        "without a pace, all",
        "not measured yet",
        "alone, whole pieces",
        "alone, no more than the most",
        "other models wait",
        "streams keep their target",
        "prompts outnumber a stream: as if alone",
        "prompts outnumber a stream, and other models wait",
        "twice as many prompts: twice the target",
        "slow decodes: prompts get as long again",
        "slow prompts: a few tokens cost as much as fewer",
    ],
)
def test_a_step_is_as_long_as_those_who_wait_allow(
    pace: StepPace | None, num_decodes: int, num_prompts: int, expected: int
) -> None:
    assert step_budget(config(), pace, num_decodes, num_prompts) == expected


@given(
    st.integers(64, 4096),
    st.floats(0.01, 2.0),
    st.floats(0.0, 1e5),
    st.floats(0.0, 3.0),
    st.integers(0, 64),
    st.integers(0, 1000),
    st.booleans(),
)
def test_every_running_sequence_decodes_and_the_most_is_never_passed(
    most: int, target_s: float, rate: float, decode_s: float, num_decodes: int, num_prompts: int, is_shared: bool
) -> None:
    pace = StepPace(rate, decode_s, is_shared)
    tokens = step_budget(config(most, target_s), pace, num_decodes, num_prompts)
    assert num_decodes <= tokens <= most
    assert tokens >= min(most, num_decodes + LEAST_TOKENS)
    if num_decodes and tokens - num_decodes > LEAST_TOKENS and rate:
        longest_s = max(ALONE_STEP_S, target_s, 2 * decode_s)
        assert (tokens - num_decodes) / rate <= longest_s + 1e-9 or tokens - num_decodes == FIRST_TOKENS


def test_a_long_prompt_takes_what_its_streams_leave_and_more_when_they_are_gone() -> None:
    engine = PretendEngine(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=8192, num_blocks=3000)
    engine.request([1] * 10, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    engine.request([2] * 3000)
    pace = StepPace(1000.0, 0.02)
    assert [row.num_tokens for row in engine.step(pace=pace).rows] == [1, 128]
    while engine.scheduler.num_running > 1:
        engine.step(pace=pace)
    assert [row.num_tokens for row in engine.step(pace=pace).rows] == [384]


def test_a_target_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target_itl_s is 0\.0; it must be above 0"):
        config(target_itl_s=0.0)
