"""Beams of one request in the scheduler: they share blocks, move together, and come to the same in any company."""

from __future__ import annotations

from typing import Any

import pytest
from growth import Grants
from hypothesis import given, settings
from hypothesis import strategies as st
from solo_beams import Text, solo_beams

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_worker.core.request import FinishReason, Request, SequenceState
from naru_worker.core.request_check import max_beam_tokens
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.testing_engine import PretendEngine

TEXT = [index * 7 % 11 for index in range(60)]


def beams(width: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(**{"beam_width": width, "n": width, "max_tokens": 8, **more})


def outcome(engine: PretendEngine, request: Request) -> list[Text]:
    choices = request.sequences[: request.params.n]
    return [(tuple(engine.tokens[each]), engine.finished[each]) for each in choices]


def expected(engine: PretendEngine, request: Request) -> list[Text]:
    longest = max_beam_tokens(request, engine.config, engine.kv) - len(request.prompt_token_ids)
    most = longest if request.params.max_tokens is None else min(longest, request.params.max_tokens)
    return solo_beams(engine.model, request, max_tokens=most, eos_token_ids=engine.config.eos_token_ids)


def run(params: SamplingParams, prompt_length: int = 10, **config: Any) -> tuple[PretendEngine, Request]:
    engine = PretendEngine(**config)
    request = engine.request(TEXT[:prompt_length], params)
    engine.drain()
    return engine, request


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_the_best_texts_are_those_of_a_plain_search(width: int, length_penalty: float) -> None:
    for prompt_length in (1, 3, 4, 9, 16):
        engine, request = run(
            beams(width, length_penalty=length_penalty), prompt_length, eos_token_ids=(3, 9), vocab_size=12
        )
        assert outcome(engine, request) == expected(engine, request)


def test_nothing_comes_out_before_the_end_and_only_n_choices_do() -> None:
    engine = PretendEngine()
    request = engine.request(TEXT[:10], beams(4, n=2))
    while engine.scheduler.has_work:
        assert not engine.tokens
        engine.step()
    assert set(engine.finished) == set(request.sequences[:2])
    assert all(each.state is SequenceState.FINISHED for each in request.sequences)


def test_a_step_computes_one_token_of_every_beam() -> None:
    engine, _ = run(beams(4, max_tokens=6))
    sizes = [[row.num_tokens for row in plan.rows] for plan in engine.plans]
    assert sizes[0] == [10]
    assert sizes[1:] == [[1, 1, 1, 1]] * 5


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    engine = PretendEngine(block_size=4, max_num_batched_tokens=64)
    request = engine.request(TEXT[:41], beams(8, max_tokens=3))
    engine.step()
    assert engine.scheduler.kv_stats().num_used_blocks == 11
    # Ten whole blocks of the prompt are everybody's; one beam writes on in the eleventh, seven in copies of it.
    copies = engine.step().copies
    assert len(copies) == 7
    assert len({source for source, _ in copies}) == 1
    assert len({tuple(each.block_table[:10]) for each in request.beams}) == 1
    engine.drain()


def test_beams_give_way_together_and_go_on_where_they_stood() -> None:
    engine = PretendEngine(num_blocks=25, block_size=2, max_num_seqs=8)
    rival = engine.request(TEXT[20:36], SamplingParams(max_tokens=28, ignore_eos=True))
    for _ in range(8):
        engine.step()
    request = engine.request(TEXT[:9], beams(4, max_tokens=10))
    engine.step()
    engine.step()
    while request.beams[0].state is SequenceState.RUNNING:
        engine.step()
    assert {each.state for each in request.beams[1:]} == {SequenceState.FORKING}
    assert not any(each.block_table for each in request.sequences)
    engine.drain()
    assert engine.scheduler.counters.num_preemptions >= 4
    assert outcome(engine, request) == expected(engine, request)
    engine.check_solo(rival)


def test_places_are_kept_for_all_beams_from_the_first_row_on() -> None:
    engine = PretendEngine(max_num_seqs=5, max_num_batched_tokens=6)
    request = engine.request(TEXT[:20], beams(4))
    others = [engine.request(TEXT[i : i + 3], SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)]
    engine.step()
    engine.step()
    assert sum(each.sequences[0].state is SequenceState.RUNNING for each in others) <= 1
    engine.drain()
    assert outcome(engine, request) == expected(engine, request)
    engine.check_solo_after_drain(*others)


def test_a_search_without_max_tokens_ends_where_its_beams_fill_the_pool_side_by_side() -> None:
    engine, request = run(
        beams(3, max_tokens=None), 10, num_blocks=16, block_size=4, eos_token_ids=(), max_model_len=60
    )
    # 15 blocks: 2 shared, 4 more for each beam; and one token that is chosen, but not computed.
    lengths = {len(tokens) for tokens, _ in outcome(engine, request)}
    assert lengths == {6 * 4 + 1 - 10}
    assert outcome(engine, request) == expected(engine, request)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancelling_frees_every_beam(num_steps: int, in_flight: bool) -> None:
    engine = PretendEngine(max_num_batched_tokens=8)
    request = engine.request(TEXT[:12], beams(4, n=2))
    for _ in range(num_steps):
        engine.step()
    if in_flight:
        engine.step(between=lambda: engine.cancel(request))
    else:
        engine.cancel(request)
    assert engine.finished == dict.fromkeys(request.sequences[:2], FinishReason.CANCELLED)
    engine.drain()


def test_a_failed_step_ends_the_search_and_frees_every_beam() -> None:
    engine = PretendEngine()
    request = engine.request(TEXT[:12], beams(4, n=1))
    for _ in range(3):
        engine.step()
    engine.step(fails=True)
    assert engine.finished == {request.sequences[0]: FinishReason.ERROR}
    engine.drain()


def test_prompt_logprobs_come_with_the_first_choice() -> None:
    engine, request = run(beams(3, prompt_logprobs=1), 10, max_num_batched_tokens=8)
    [positions] = engine.prompt_logprobs.values()
    assert [each.chosen.token_id if each.chosen else None for each in positions] == [None, *TEXT[1:10]]
    assert list(engine.prompt_logprobs) == [request.sequences[0]]


def test_what_a_search_cannot_keep_is_refused_by_name() -> None:
    engine = PretendEngine(max_num_seqs=4, num_blocks=16, block_size=4)
    with pytest.raises(InvalidRequest, match="at most 4 here") as refused:
        engine.request(TEXT[:4], beams(5))
    assert refused.value.param == "beam_width"
    with pytest.raises(ContextLengthExceeded, match="beam_width is 4: that many beams of up to 41 tokens") as too_long:
        engine.request(TEXT[:12], beams(4, max_tokens=30))
    assert too_long.value.param == "beam_width"
    assert not engine.scheduler.has_work


@given(
    data=st.data(),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([1, 2, 3, 4]),
    max_num_seqs=st.integers(4, 8),
    extra_tokens=st.integers(0, 20),
    chunk=st.sampled_from([None, 1, 5]),
    enable_prefix_caching=st.booleans(),
    chunk_blocks=st.sampled_from([None, 3, 5]),
)
@settings(max_examples=150, deadline=None)
def test_a_search_comes_to_the_same_in_any_company(
    data: st.DataObject,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    extra_tokens: int,
    chunk: int | None,
    enable_prefix_caching: bool,
    chunk_blocks: int | None,
) -> None:
    growth = None if chunk_blocks is None else Grants(chunk_blocks, 1)
    engine = PretendEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_tokens,
        max_model_len=30,
        long_prefill_chunk_tokens=chunk,
        enable_prefix_caching=enable_prefix_caching,
        vocab_size=11,
        eos_token_ids=(3,),
        growth=growth,
    )
    searches: list[Request] = []
    for _ in range(data.draw(st.integers(1, 5))):
        begin, length = data.draw(st.sampled_from([0, 0, 1])), data.draw(st.integers(1, 14))
        width = data.draw(st.sampled_from([None, 1, 2, 4]))
        params = SamplingParams(
            max_tokens=data.draw(st.sampled_from([None, 1, 4, 9])),
            beam_width=width,
            n=1 if width is None else data.draw(st.integers(1, width)),
            length_penalty=1.0 if width is None else data.draw(st.sampled_from([0.0, 1.0, -2.0])),
            ignore_eos=data.draw(st.booleans()),
        )
        priority = data.draw(st.sampled_from([0, 0, 1, -1]))
        try:
            request = engine.request(TEXT[begin : begin + length], params, priority=priority)
        except ContextLengthExceeded:
            continue
        if width is not None:
            searches.append(request)
        for _ in range(data.draw(st.integers(0, 6))):
            if growth is not None:
                growth.plenty = data.draw(st.integers(0, 3))
                growth.most = growth.plenty + data.draw(st.integers(0, 3))
            engine.step()
    if growth is not None:
        growth.plenty = growth.most = 100
    engine.drain()
    for request in searches:
        assert outcome(engine, request) == expected(engine, request)


@pytest.mark.parametrize("gap", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_giving_way_again_and_again_at_any_point_changes_nothing(gap: int, enable_prefix_caching: bool) -> None:
    # Few tokens a step: beams that are computed again wait for their mates over several steps.
    engine = PretendEngine(
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        long_prefill_chunk_tokens=4,
        vocab_size=11,
        enable_prefix_caching=enable_prefix_caching,
    )
    # Texts with little in common, so that much of each is its own.
    request = engine.request(TEXT[:5], beams(4, max_tokens=24, length_penalty=0.0))
    num_waiting = 0
    for _ in range(40):
        for _ in range(gap):
            engine.step()
            num_waiting += any(each.candidates is not None for each in request.beams)
        if engine.scheduler.num_running:
            engine.scheduler._roster.preempt_last()
            engine.scheduler.check()
    engine.drain()
    assert gap == 1 or num_waiting > 0
    assert outcome(engine, request) == expected(engine, request)
    # What was cached under a text's hash must be that text: the pretend model refuses anything else.
    for tokens, _ in outcome(engine, request):
        engine.check_solo_after_drain(engine.request([*TEXT[:5], *tokens], SamplingParams(max_tokens=2)))
