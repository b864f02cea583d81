from __future__ import annotations

from bench.hub_traffic import Answer, Outcome


def answer(*token_ids: int, logprob: float = -0.5) -> Answer:
    return Answer(token_ids, tuple(logprob for _ in token_ids))


def test_other_tokens_or_other_probabilities_are_another_models_answer() -> None:
    assert answer(1, 2).matches(answer(1, 2, logprob=-0.50001))
    assert not answer(1, 2).matches(answer(1, 3))
    assert not answer(1, 2).matches(answer(1, 2, logprob=-0.51))


def test_answers_are_compared_with_the_models_own_first_one() -> None:
    outcome = Outcome(max_tokens=2)
    outcome.add_answer("a", answer(1, 2), 0.1, 0.2)
    outcome.add_answer("b", answer(3, 4), 0.1, 0.2)
    outcome.add_answer("a", answer(1, 2), 0.1, 0.2)
    assert outcome.num_mismatches == 0
    outcome.add_answer("a", answer(3, 4), 0.1, 0.2)
    assert outcome.num_mismatches == 1
    assert outcome.answers["a"] == answer(1, 2)
    assert outcome.num_done == 4


def test_an_answer_of_another_length_is_a_failure_and_no_reference() -> None:
    outcome = Outcome(max_tokens=2)
    outcome.add_answer("a", answer(1), 0.1, 0.2)
    outcome.add_answer("a", Answer((1, 2), (-0.5,)), 0.1, 0.2)
    assert outcome.failures.total() == 2
    assert not outcome.answers
    assert not outcome.request_s


def test_failures_are_counted_by_their_words() -> None:
    outcome = Outcome(max_tokens=2)
    for why in ("UNAVAILABLE: no room", "UNAVAILABLE: no room", "INTERNAL: lost"):
        outcome.add_failure(why)
    assert outcome.failures.most_common(1) == [("UNAVAILABLE: no room", 2)]
    assert outcome.num_done == 3


def test_models_with_equal_answers_are_not_told_apart() -> None:
    outcome = Outcome(max_tokens=1)
    for model, token in (("a", 1), ("b", 1), ("c", 2)):
        outcome.add_answer(model, answer(token), 0.1, 0.2)
    assert outcome.num_distinct() == 1
