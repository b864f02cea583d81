"""Which output waits for the next step's, what leaves at once, and that nothing is lost or reordered on the way."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.adapters.engine.deltas import Outbox, SequenceDelta
from naru_worker.adapters.engine.output_pace import OutputPace, merged
from naru_worker.core.request import FinishReason, RequestId

R = RequestId("r")


@pytest.mark.parametrize(
    "urgent",
    [
        SequenceDelta(R, is_first=True),
        SequenceDelta(R, is_last=True),
        SequenceDelta(R, index=1, finish_reason=FinishReason.STOP),
    ],
    ids=["first token", "end", "end of a choice"],
)
def test_beginnings_and_ends_do_not_wait(urgent: SequenceDelta) -> None:
    pace = OutputPace(0.02, lambda: 7.0)
    pace.sent()
    assert pace.may_wait([SequenceDelta(R, text="a")], 0.004)
    assert not pace.may_wait([SequenceDelta(R, text="a"), urgent], 0.004)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.booleans()), max_size=30))
def test_merging_keeps_each_choice_whole_and_the_end_last(told: list[tuple[str, int, bool]]) -> None:
    ended: set[tuple[str, int]] = set()
    outbox: Outbox = []
    for number, (request, index, ends) in enumerate(told):
        if (request, index) in ended:
            continue
        is_last = ends and sum(1 for name, _ in ended if name == request) == 2
        reason = FinishReason.STOP if ends else None
        outbox.append(SequenceDelta(RequestId(request), index, str(number), (number,), reason, is_last=is_last))
        if ends:
            ended.add((request, index))

    def by_choice(deltas: Outbox) -> dict[object, tuple[str, tuple[int, ...], object]]:
        result: dict[object, tuple[str, tuple[int, ...], object]] = collections.defaultdict(lambda: ("", (), None))
        for delta in deltas:
            text, ids, _ = result[(delta.request_id, delta.index)]
            result[(delta.request_id, delta.index)] = (text + delta.text, ids + delta.token_ids, delta.finish_reason)
        return result

    expected = by_choice(outbox)
    small = merged(outbox)
    assert by_choice(small) == expected
    assert len(small) <= len(expected) + sum(delta.is_last for delta in small)
    for place, delta in enumerate(small):
        if delta.is_last:
            assert all(later.request_id != delta.request_id for later in small[place + 1 :])
