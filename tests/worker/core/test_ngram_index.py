"""The index of a sequence's own text: what it finds stands there, and what stands there it finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.draft_odds import DraftOdds
from naru_worker.core.draft_source import DraftSource
from naru_worker.core.ngram_index import MAX_CANDIDATES, MAX_MATCH, MIN_MATCH, NgramIndex

texts = st.lists(st.integers(0, 3) | st.sampled_from([0, 151_000, 2**31 - 1]), max_size=60)


def common_tail(token_ids: list[int], place: int) -> int:
    """How many tokens before `place` are the last ones of the text."""
    length = 0
    while length < min(place, MAX_MATCH) and token_ids[place - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


@given(texts, st.lists(st.integers(0, 60)))
def test_a_find_is_a_true_match_and_no_short_text_s_longest_is_missed(text: list[int], cuts: list[int]) -> None:
    index = NgramIndex()
    for cut in sorted(cuts):
        index.extend(text[:cut])
        assert cut == len(text) or index.find(text) == (0, 0) or cut > len(text), "it has not seen all of it"
    index.extend(text)
    place, length = index.find(text)
    lengths = {each: common_tail(text, each) for each in range(1, len(text))}
    if place:
        assert MIN_MATCH <= length == lengths[place]
    longest = max(lengths.values(), default=0)
    if longest < MIN_MATCH:
        assert not place
    elif len(text) <= MAX_CANDIDATES:
        assert length == longest
    else:
        newest = max(each for each, found in lengths.items() if found >= MIN_MATCH)
        # The newest of all pairs is looked at first, unless pairs of other tokens share its slot.
        assert place == 0 or length >= min(lengths[newest], length)


def test_a_pair_is_found_however_long_ago_it_was() -> None:
    text = [7, 8, 9, *range(100, 20_000), 7, 8]
    index = NgramIndex()
    for cut in range(1, len(text) + 1, 997):
        index.extend(text[:cut])
    index.extend(text)
    assert index.find(text) == (2, 2)
    index.extend([*text, 9])
    assert index.find([*text, 9]) == (3, 3)


def test_the_longest_of_several_matches_wins_and_the_newest_of_equal_ones() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 2, 3, 4]
    index = NgramIndex()
    index.extend(text)
    assert index.find(text) == (4, 3)
    text = [3, 4, 50, 3, 4, 60, 3, 4]
    index = NgramIndex()
    index.extend(text)
    assert index.find(text) == (5, 2)


def test_a_source_follows_its_match_and_goes_round_where_the_text_does() -> None:
    source = DraftSource(DraftOdds(100.0))
    text = [1, 2, 3, 1, 2]
    assert source.catch_up(text)
    assert source.drafts(text, 2) == (3, 1)
    assert source.drafts(text, 7) == (3, 1, 2, 3, 1, 2, 3)
    text += [3, 1]
    assert source.catch_up(text)
    assert source.drafts(text, 2) == (2, 3)
    text += [9]
    assert not source.catch_up(text)
    text += [1, 2]
    assert source.catch_up(text)
    assert source.drafts(text, 1) == (3,)


def test_odds_follow_what_came_true_and_fall_with_each_guess() -> None:
    model = DraftOdds(1000.0)
    first, second = DraftSource(model), DraftSource(model)
    text = [5, 6, 7] * 30
    for end in range(4, len(text)):
        first.catch_up(text[:end])
    chances = first.odds(20, 0.0)
    assert len(chances) == 20
    assert chances == sorted(chances, reverse=True)
    assert 0.9 < chances[0] < 1.0
    assert len(first.odds(20, chances[4])) == 5
    # A new text of the same model starts from that, and unlearns it by itself.
    assert model.of(12) > 0.9
    for number in range(40):
        second = DraftSource(model)
        second.catch_up([1, 2, 3, 1, 2])
        second.catch_up([1, 2, 3, 1, 2, 100 + number])
    assert model.of(2) < 0.1
    assert model.of(12) > 0.9
