from __future__ import annotations

import itertools

import pytest
from bench.workload import (
    CASE_NAMES,
    FULL,
    LONG_CASES,
    LONG_MODEL_LEN,
    MAX_MODEL_LEN,
    NUM_CONCURRENT,
    NUM_STREAMS,
    REDUCED,
    WARM,
    WARMED,
    Ask,
    CaseName,
    Scale,
    batches,
    single_token_words,
)

WORDS = tuple("".join(letters) for letters in itertools.product("abcdefgh", repeat=3))


def asks(case: CaseName, repeat: int = 0, seed: int = 1, scale: Scale = FULL) -> list[Ask]:
    return [ask for batch in batches(case, WORDS, seed, repeat, scale) for ask in batch.asks]


@pytest.mark.parametrize("case", CASE_NAMES)
@pytest.mark.parametrize("scale", [FULL, REDUCED, WARM], ids=["full", "reduced", "warm"])
def test_a_prompt_has_exactly_the_words_it_claims_and_fits_every_server(case: CaseName, scale: Scale) -> None:
    for ask in asks(case, scale=scale):
        assert len(ask.prompt.split(" ")) == ask.prompt_tokens
        assert ask.prompt_tokens + ask.max_tokens <= (LONG_MODEL_LEN if case in LONG_CASES else MAX_MODEL_LEN)


@pytest.mark.parametrize("case", CASE_NAMES)
def test_equal_arguments_give_every_engine_equal_prompts(case: CaseName) -> None:
    assert asks(case) == asks(case)
    assert asks(case, seed=2) != asks(case)


@pytest.mark.parametrize("case", [case for case in CASE_NAMES if case != "decode8k"])  # it measures what is cached
def test_no_repeat_can_use_what_an_earlier_one_left_in_a_cache(case: CaseName) -> None:
    rounds = [asks(case, -1, scale=WARM), asks(case, 0), asks(case, 1)]
    for one, other in itertools.combinations(rounds[0 if case in WARMED else 1 :], 2):
        for a, b in itertools.product(one, other):
            same = [one == other for one, other in zip(a.prompt.split(), b.prompt.split(), strict=False)]
            assert (same.index(False) if False in same else len(same)) < 8  # half a KV block


def test_sixteen_at_once_have_lengths_of_their_own() -> None:
    (batch,) = batches("conc16", WORDS, 1, 0)
    assert sorted(ask.prompt_tokens for ask in batch.asks) == list(range(64, 192, 8))
    assert {ask.max_tokens for ask in batch.asks} == {128}


def test_the_shared_case_primes_then_measures_other_tails_on_the_same_prefix() -> None:
    prime, measured = batches("shared", WORDS, 1, 0)
    assert (prime.measured, measured.measured) == (False, True)
    assert len(prime.asks) == len(measured.asks) == NUM_CONCURRENT
    prompts = [ask.prompt.split() for ask in (*prime.asks, *measured.asks)]
    assert len({tuple(words[:1024]) for words in prompts}) == 1
    assert len({tuple(words[1024:]) for words in prompts}) == 2 * NUM_CONCURRENT
    assert {ask.max_tokens for ask in measured.asks} == {32}


def test_decoding_after_a_long_prompt_finds_the_prompt_where_its_prefill_left_it() -> None:
    (prefill,) = batches("prefill8k", WORDS, 1, 0)
    prime, measured = batches("decode8k", WORDS, 1, 0)
    assert prefill.asks[0] == prime.asks[0]
    assert measured.asks[0].prompt == prefill.asks[0].prompt
    assert (prime.measured, measured.measured) == (False, True)
    assert measured.asks[0].prompt_tokens == 8000
    (again,) = batches("decode8k", WORDS, 1, 1)
    assert again == measured  # the prompt is computed once, however often what comes after it is measured


def test_a_long_prompt_comes_when_the_streams_run() -> None:
    (batch,) = batches("mixed", WORDS, 1, 0)
    *streams, long = batch.asks
    assert [ask.after_chunks for ask in streams] == [0] * NUM_STREAMS
    assert (long.prompt_tokens, long.max_tokens) == (2048, 1)
    assert 0 < long.after_chunks < min(ask.max_tokens for ask in streams)


def test_usable_words_are_one_token_with_and_without_a_space() -> None:
    both = [f"{word}" for word in WORDS[:70]]
    tokens = ["the", "Ġthe", "Ġonlyspaced", "onlybare", "Ġa", "a", "ĠUpper", "Upper", "Ġx1y", "x1y"]
    words = single_token_words([*tokens, *both, *(f"Ġ{word}" for word in both)])
    assert words == ("the", *both)


def test_a_vocabulary_without_plain_words_is_refused() -> None:
    with pytest.raises(ValueError, match="1 plain one-token words"):
        single_token_words(["the", "Ġthe", "▁foreign"])
