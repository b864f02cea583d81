"""What is refused before it reaches a queue."""

from __future__ import annotations

import pytest

from naru_proto.errors import ContextLengthExceeded, InvalidRequest
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.testing_engine import PretendEngine


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        PretendEngine().request([])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 50, 2**31])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token id {token_id}; .* \[0, 50\)"):
        PretendEngine(vocab_size=50).request([1, token_id, 2])


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_taken"),
    [(15, None, True), (16, None, False), (16, 1, False), (16, 0, True), (17, 0, False)],
)
def test_a_prompt_must_leave_room_for_one_token_unless_none_is_wanted(
    num_prompt: int, max_tokens: int | None, is_taken: bool
) -> None:
    engine = PretendEngine(max_model_len=16)
    params = SamplingParams(max_tokens=max_tokens)
    if is_taken:
        engine.check_solo_after_drain(engine.request(range(num_prompt), params))
    else:
        with pytest.raises(ContextLengthExceeded, match=rf"{num_prompt} tokens .* 16"):
            engine.request(range(num_prompt), params)
    assert engine.scheduler.num_requests == 0


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_served() -> None:
    engine = PretendEngine(num_blocks=9, block_size=4, max_model_len=256)
    with pytest.raises(ContextLengthExceeded, match=r"33 tokens and needs 9 KV blocks; .* 8 blocks of 4 .* shorten"):
        engine.request([1] * 33)
    engine.check_solo_after_drain(engine.request([1, 2, 3]))


def test_a_prompt_that_fills_the_pool_exactly_is_served_as_far_as_it_goes() -> None:
    engine = PretendEngine(num_blocks=9, block_size=4, max_model_len=256)
    request = engine.request([1] * 32, SamplingParams(max_tokens=1))
    engine.check_solo_after_drain(request)


def test_choices_that_can_never_fit_side_by_side_are_refused() -> None:
    engine = PretendEngine(num_blocks=17, block_size=4, max_model_len=256)
    # 2 shared prompt blocks and 3 choices x (ceil((10 + 15) / 4) - 2) = 17 blocks; one token less needs 14.
    with pytest.raises(ContextLengthExceeded, match=r"n is 3: .* need 17 KV blocks; .* 16 blocks .* lower n") as caught:
        engine.request(range(10), SamplingParams(max_tokens=16, n=3))
    assert caught.value.param == "n"
    engine.check_solo_after_drain(engine.request(range(10), SamplingParams(max_tokens=15, n=3)))


def test_choices_without_a_length_count_only_their_prompt() -> None:
    engine = PretendEngine(num_blocks=17, block_size=4, max_model_len=40)
    engine.check_solo_after_drain(engine.request(range(10), SamplingParams(n=3)))
    with pytest.raises(ContextLengthExceeded, match="n is 15"):
        engine.request(range(10), SamplingParams(n=15))


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = PretendEngine()
    first = engine.request([1, 2], request_id="x")
    with pytest.raises(InvalidRequest, match="'x' is in use"):
        engine.request([3], request_id="x")
    engine.check_solo_after_drain(first)
    engine.request([3], request_id="x")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 3), ("max_model_len", 0), ("watermark_ratio", 1.0)],
)
def test_a_config_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    fields = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16, field: value}
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        SchedulerConfig(**fields)  # type: ignore[arg-type]
