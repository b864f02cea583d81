"""Measured rates: what each kind of step says, and how fast they follow."""

from __future__ import annotations

import pytest

from naru_worker.core.step_rates import MIN_SAMPLE_TOKENS, MIN_TOKENS, StepRates


def warm() -> StepRates:
    """Past the first step after a load, which is no sample."""
    rates = StepRates()
    rates.observe(MIN_SAMPLE_TOKENS, 0, 30.0)
    return rates


def test_nothing_is_known_before_it_was_measured() -> None:
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)
    rates.observe(0, 0, 1.0)
    rates.observe(100, 0, 0.0)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_a_mixed_step_counts_for_prompts_what_its_decodes_do_not_take() -> None:
    rates = warm()
    rates.observe(0, 3, 0.02)
    for _ in range(3):
        rates.observe(100, 3, 0.12)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)
    assert rates.decode_step_s == 0.02
    # However slow decodes are believed to be, a prompt takes some time.
    slow = warm()
    slow.observe(0, 1, 5.0)
    for _ in range(3):
        slow.observe(100, 1, 1.0)
    assert slow.prefill_tokens_per_s == pytest.approx(1000.0)


def test_what_is_left_of_cached_prompts_says_nothing_of_a_rate() -> None:
    rates = warm()
    for _ in range(20):
        rates.observe(2, 0, 0.02)
    assert rates.prefill_tokens_per_s == 0.0
    rates.observe(4096, 0, 4.096)
    for _ in range(20):
        rates.observe(MIN_SAMPLE_TOKENS - 1, 0, 10.0)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


def test_a_rate_is_told_once_there_is_enough_of_it() -> None:
    rates = warm()
    for _ in range(MIN_TOKENS // 64 - 1):
        rates.observe(64, 0, 0.064)
        assert rates.prefill_tokens_per_s == 0.0
    rates.observe(64, 0, 0.064)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0)


def test_rates_follow_a_change_within_a_few_half_lives() -> None:
    rates = warm()
    for _ in range(10):
        rates.observe(1000, 0, 1.0)
        rates.observe(0, 1, 0.01)
    for _ in range(30):
        rates.observe(1000, 0, 0.25)
    for _ in range(300):
        rates.observe(0, 1, 0.04)
    assert rates.prefill_tokens_per_s == pytest.approx(4000.0, rel=0.05)
    assert rates.decode_step_s == pytest.approx(0.04, rel=0.02)
