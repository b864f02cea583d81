"""A sequence's text as the client sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.output_text import OutputStream, TextDelta
from naru_worker.core.request import FinishReason, Request, RequestId, Sequence
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import SequenceOutput
from naru_worker.core.stop_strings import StopStrings

EOT = 256
TOOL = 257


class Bytes:
    """Token i is byte i; EOT is special, TOOL is an added token with text."""

    def piece(self, token_id: int) -> bytes | None:
        if token_id == TOOL:
            return b"<tool>"
        return bytes([token_id]) if token_id < EOT else None

    def special_text(self, token_id: int) -> str | None:
        return "<|eot|>" if token_id == EOT else None


def some_sequence() -> Sequence:
    return Request(RequestId("r"), (1,), SamplingParams(), seed=0, arrival=0).sequences[0]


def push(
    stream: OutputStream, text: str | bytes | list[int], finish: FinishReason | None = None, stop_reason: str = ""
) -> TextDelta:
    ids = list(text.encode() if isinstance(text, str) else text)
    return stream.push(SequenceOutput(some_sequence(), tuple(ids), finish, stop_reason))


def make(*stops: str, min_tokens: int = 0) -> OutputStream:
    return OutputStream(Bytes(), StopStrings(stops), min_tokens=min_tokens)


def test_a_stop_string_ends_the_stream_and_tokens_after_it_do_not_count() -> None:
    stream = make("STOP")
    assert push(stream, "one ST") == TextDelta("one ", 6)
    assert push(stream, "OPtwo") == TextDelta("", 2, FinishReason.STOP, "STOP")
    assert push(stream, "more", FinishReason.LENGTH) == TextDelta("", 0)
    assert stream.num_tokens == 8


def test_a_stop_string_wins_over_length() -> None:
    assert push(make("b"), "ab", FinishReason.LENGTH) == TextDelta("a", 2, FinishReason.STOP, "b")


def test_held_text_comes_with_the_end() -> None:
    stream = make("abcdef")
    assert push(stream, "xabc") == TextDelta("x", 4)
    assert push(stream, "d", FinishReason.LENGTH) == TextDelta("abcd", 1, FinishReason.LENGTH)


def test_an_ending_token_counts_but_has_no_text() -> None:
    stream = make()
    assert push(stream, "hi!", FinishReason.STOP, "token:33") == TextDelta("hi", 3, FinishReason.STOP, "token:33")


def test_a_stop_string_that_spells_a_special_token_stops_there() -> None:
    stream = make("<|eot|>")
    assert push(stream, [*b"hi<", EOT]) == TextDelta("hi<", 4, FinishReason.STOP, "<|eot|>")
    # Without it, the token has no text; spelled in ordinary tokens it stops as any other text.
    assert push(make("x"), [*b"hi", EOT]) == TextDelta("hi", 3)
    assert push(make("<|eot|>"), "hi<|eot|>").text == "hi"


def test_added_tokens_that_are_not_special_keep_their_text() -> None:
    assert push(make(), [TOOL, *b"x"]).text == "<tool>x"
    assert push(make("ool>"), [TOOL, *b"x"]) == TextDelta("<t", 1, FinishReason.STOP, "ool>")


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "a"), (3, "a--b"), (5, "a--b"), (6, "a--b--c")]
)
def test_a_stop_must_be_completed_after_the_first_min_tokens(min_tokens: int, text: str) -> None:
    stream = make("--", min_tokens=min_tokens)
    joined = "".join(push(stream, char).text for char in "a--b--c")
    assert joined + push(stream, "", FinishReason.LENGTH).text == text


def test_min_tokens_holds_for_special_tokens_too() -> None:
    stream = make("<|eot|>", min_tokens=2)
    assert push(stream, [EOT, *b"a", EOT]) == TextDelta("a", 3, FinishReason.STOP, "<|eot|>")


def test_a_character_cut_off_by_the_end_leaves_at_most_one_mark() -> None:
    stream = make("zz")
    assert push(stream, b"z" + "🚀".encode()[:2]) == TextDelta("", 3)
    assert push(stream, b"\x9a", FinishReason.LENGTH) == TextDelta("z\ufffd", 1, FinishReason.LENGTH)


@given(
    text=st.text("ab🚀č", max_size=20),
    stops=st.lists(st.text("ab🚀č", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_the_joined_stream_is_the_text_up_to_the_stop(text: str, stops: list[str], sizes: list[int]) -> None:
    data = text.encode()
    stream = make(*stops)
    deltas = []
    position = 0
    for size in sizes * (len(data) + 1):
        deltas.append(push(stream, data[position : position + size]))
        position += size
        if position >= len(data):
            break
    deltas.append(push(stream, "", FinishReason.LENGTH))
    joined = "".join(delta.text for delta in deltas)
    ends = [text[:end] for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        stop = max((stop for stop in stops if ends[0].endswith(stop)), key=len)
        assert joined == ends[0][: -len(stop)]
        assert [d.stop_reason for d in deltas if d.finish_reason] == [stop]
        assert sum(delta.num_tokens for delta in deltas) == len(ends[0].encode())
    else:
        assert joined == text
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH]
        assert sum(delta.num_tokens for delta in deltas) == len(data)


def test_shown_special_tokens_are_text_but_for_what_ends_the_sequence() -> None:
    def shown(*stops: str) -> OutputStream:
        return OutputStream(Bytes(), StopStrings(stops), show_special_tokens=True)

    stream = shown()
    assert push(stream, [97, EOT, 98]) == TextDelta("a<|eot|>b", 3)
    assert push(stream, [99, EOT], FinishReason.STOP) == TextDelta("c", 2, FinishReason.STOP)
    assert push(shown(), [97, EOT], FinishReason.LENGTH) == TextDelta("a<|eot|>", 2, FinishReason.LENGTH)
    assert push(shown("<|eot|>"), [97, EOT, 98]) == TextDelta("a", 2, FinishReason.STOP, "<|eot|>")
    # A stop string may end inside the text of a special token.
    assert push(shown("a<|"), [97, EOT, 98]) == TextDelta("", 2, FinishReason.STOP, "a<|")
