"""What a request is expected to cost."""

from __future__ import annotations

import pytest

from naru_proto.v1.inference_pb2 import SamplingParams
from naru_router.core.tenancy.cost import USUAL_ANSWER_TOKENS, expected_tokens


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(max_tokens=10), 110),
        (SamplingParams(max_tokens=10, n=3), 130),
        (SamplingParams(max_tokens=0), 100),
        (SamplingParams(), 100 + USUAL_ANSWER_TOKENS),
    ],
)
def test_a_request_is_expected_to_cost_its_prompt_and_its_longest_answers(
    sampling: SamplingParams, expected: int
) -> None:
    assert expected_tokens(100, sampling) == expected


def test_what_has_no_answer_costs_its_prompt_alone() -> None:
    assert expected_tokens(100, SamplingParams(), has_answer=False) == 100
