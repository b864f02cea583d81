"""Stop strings: never a character too many, never one held back without need."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from naru_worker.core.stop_strings import StopMatch, StopMatcher, StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By trying every end, first to last, and every stop, longest first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def feed_all(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        match = matcher.feed(piece)
        text += match.text
        if match.stop is not None:
            return text, match.stop
    return text + matcher.finish(), None


@given(pieces=st.lists(TEXT, max_size=8), stops=STOPS)
@example(pieces=["ab", "abc"], stops=["abc"])
@example(pieces=["abc"], stops=["c", "abc"])
def test_the_cut_depends_on_the_characters_alone(pieces: list[str], stops: list[str]) -> None:
    assert feed_all(StopMatcher(StopStrings(stops)), pieces) == expected("".join(pieces), stops)


@given(text=TEXT, stops=STOPS)
def test_exactly_the_longest_possible_start_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent = seen = ""
    for char in text:
        match = matcher.feed(char)
        sent += match.text
        seen += char
        if match.stop is not None:
            return
        starts = [stop[:length] for stop in stops for length in range(1, len(stop)) if seen.endswith(stop[:length])]
        assert sent == seen[: len(seen) - max(map(len, starts), default=0)]


def test_a_stop_over_several_pieces_leaks_nothing() -> None:
    matcher = StopMatcher(StopStrings([" Thu Fri Sat"]))
    assert [matcher.feed(piece).text for piece in ("Tue", " Wed Th", "u F", "ri S")] == ["Tue", " Wed", "", ""]
    assert matcher.feed("at Sun") == StopMatch("", " Thu Fri Sat")


def test_a_start_that_comes_to_nothing_is_released() -> None:
    matcher = StopMatcher(StopStrings([" Thu Fri"]))
    assert matcher.feed("Wed Thu F").text == "Wed"
    assert matcher.feed("eb").text == " Thu Feb"
    assert matcher.finish() == ""


def test_what_is_held_at_the_end_is_given_out() -> None:
    matcher = StopMatcher(StopStrings(["abcd"]))
    assert matcher.feed("xabc").text == "x"
    assert (matcher.finish(), matcher.finish()) == ("abc", "")


def test_a_stop_completed_too_early_is_text_but_its_tail_may_begin_another() -> None:
    matcher = StopMatcher(StopStrings(["aa"]))
    assert matcher.feed("xaa", obeys=False) == StopMatch("xa")
    assert matcher.feed("a") == StopMatch("", "aa")


def test_an_early_completion_is_not_obeyed_later() -> None:
    matcher = StopMatcher(StopStrings(["aa", "aab"]))
    assert matcher.feed("aa", obeys=False) == StopMatch("")
    assert matcher.feed("x") == StopMatch("aax")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_work_stays_linear_for_stops_made_to_hurt() -> None:
    """Every character is compared a bounded number of times: 20,000 of them against 16 stops of 1024."""
    stops = StopStrings(["a" * 1023 + chr(ord("b") + index) for index in range(16)])
    comparisons = 0

    class Char(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__ne__(self, other)

    class Text(str):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return (Char(char) for char in str.__str__(self))

    matcher = StopMatcher(stops)
    for _ in range(20):
        matcher.feed(Text("a" * 999 + "x"))
    assert 0 < comparisons <= 20 * 1000 * 16 * 3
