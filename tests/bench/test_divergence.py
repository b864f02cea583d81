from __future__ import annotations

import math

import numpy as np
import pytest
from bench.divergence import FLOOR, divergence, kl_rows, log_probabilities, perplexity
from bench.llama_logits import read_logits, rows_of

RNG = np.random.default_rng(3)
LOGITS = RNG.standard_normal((70, 50)).astype(np.float32)
TARGETS = RNG.integers(0, 50, 70).astype(np.int32)


def test_log_probabilities_are_normalized_and_do_not_depend_on_an_offset() -> None:
    found = log_probabilities(LOGITS)
    assert np.exp(found.astype(np.float64)).sum(axis=1) == pytest.approx(np.ones(70), abs=1e-5)
    assert log_probabilities(LOGITS + np.float32(64)) == pytest.approx(found, abs=1e-4)


def test_what_lies_far_below_the_largest_counts_as_being_at_the_floor() -> None:
    found = log_probabilities(np.array([[0.0, -100.0, -1000.0]], np.float32))
    assert found.tolist() == [[0.0, -FLOOR, -FLOOR]]


def test_divergence_of_two_coins_is_the_known_one() -> None:
    fair, loaded = (np.log(np.array([[p, 1 - p]], np.float32)) for p in (0.5, 0.9))
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_rows(fair, loaded).tolist() == pytest.approx([expected], abs=1e-6)


def test_the_reference_itself_diverges_by_nothing_and_others_by_more_the_further_they_are() -> None:
    reference = log_probabilities(LOGITS)
    noise = RNG.standard_normal(LOGITS.shape).astype(np.float32)
    found = [divergence(reference, log_probabilities(LOGITS + scale * noise), TARGETS) for scale in (0.0, 0.01, 0.1)]
    assert found[0].mean_kl == 0.0
    assert found[0].same_top == 1.0
    assert 0 < found[1].mean_kl < found[2].mean_kl < found[2].p99_kl <= found[2].max_kl


def test_perplexity_of_guessing_is_the_number_of_tokens() -> None:
    assert perplexity(log_probabilities(np.zeros((70, 50), np.float32)), TARGETS) == pytest.approx(50, rel=1e-5)


def test_what_cannot_be_compared_is_refused() -> None:
    reference = log_probabilities(LOGITS)
    with pytest.raises(ValueError, match="cannot be compared"):
        divergence(reference, reference[:5], TARGETS)
    broken = reference.copy()
    broken[3, 3] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        divergence(reference, broken, TARGETS)


def saved(token_ids: np.ndarray, log_probs: np.ndarray) -> bytes:
    """A file as llama-perplexity writes it."""
    windows, length = token_ids.shape
    vocab = log_probs.shape[1]
    rows = np.zeros((len(log_probs), 2 * ((vocab + 1) // 2) + 4), "<u2")
    floor = log_probs.min(axis=1)
    scale = ((log_probs.max(axis=1) - floor) / 65535).astype("<f4")
    rows[:, :4] = np.stack([scale, floor.astype("<f4")], axis=1).view("<u2")
    rows[:, 4 : 4 + vocab] = np.rint((log_probs - floor[:, None]) / scale[:, None])
    head = np.array([length, vocab, windows], "<i4").tobytes()
    return b"_logits_" + head + token_ids.astype("<i4").tobytes() + rows.tobytes()


@pytest.mark.parametrize("vocab", [50, 51])
def test_the_distributions_llama_perplexity_saves_are_read_as_it_meant_them(vocab: int) -> None:
    token_ids = RNG.integers(0, vocab, (2, 12))
    log_probs = log_probabilities(RNG.standard_normal((2 * len(rows_of(12)), vocab)).astype(np.float32))
    found = read_logits(saved(token_ids, log_probs))
    assert found.token_ids.tolist() == token_ids.tolist()
    assert found.log_probs == pytest.approx(log_probs, abs=2e-4)


@pytest.mark.parametrize("cut", [0, 10, 40, -1])
def test_a_file_that_ends_early_or_is_another_is_refused(cut: int) -> None:
    data = saved(np.zeros((1, 4), np.int32), log_probabilities(np.zeros((1, 6), np.float32) + np.arange(6)))
    with pytest.raises(ValueError, match=r"not a file|does not hold"):
        read_logits(data[:cut])
