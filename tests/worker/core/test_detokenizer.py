"""Tokens to text: characters split over tokens, spaces, special tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.detokenizer import Detokenizer


class Vocabulary:
    """Token i is piece i; None is a special token."""

    def __init__(self, pieces: Sequence[bytes | None]) -> None:
        self.pieces = pieces

    def piece(self, token_id: int) -> bytes | None:
        return self.pieces[token_id] if token_id < len(self.pieces) else None

    def special_text(self, token_id: int) -> str | None:
        return f"<{token_id}>" if self.piece(token_id) is None else None


def stream(pieces: Sequence[bytes | None], *, strip_leading_space: bool = False) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(pieces), strip_leading_space=strip_leading_space)
    return [*(detokenizer.feed(token_id) for token_id in range(len(pieces))), detokenizer.finish()]


def cut(data: bytes, places: Sequence[int]) -> list[bytes | None]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


@given(text=st.text(), places=st.lists(st.integers(0, 200)))
def test_text_comes_back_however_it_is_cut_and_never_broken(text: str, places: list[int]) -> None:
    parts = stream(cut(text.encode(errors="replace"), places))
    assert "".join(parts) == text.encode(errors="replace").decode()
    assert parts[-1] == ""


@given(data=st.binary(), places=st.lists(st.integers(0, 200)))
def test_any_bytes_give_what_decoding_all_at_once_gives(data: bytes, places: list[int]) -> None:
    assert "".join(stream(cut(data, places))) == data.decode(errors="replace")


def test_a_character_cut_off_at_the_end_leaves_one_mark() -> None:
    text = "čaj 🧑‍🚀 漢字 ﷽"
    pieces: list[bytes | None] = [bytes([byte]) for byte in text.encode()]
    assert "".join(stream(pieces)) == text
    parts = stream([*pieces, b"\xf0", b"\x9f", b"\x9a"])
    assert parts[:-1] == [*stream(pieces)[:-1], "", "", ""]
    assert parts[-1] == "\ufffd"


def test_a_broken_character_is_given_up_once_no_byte_can_mend_it() -> None:
    assert stream([b"\xf0\x9f", b"a", b"\xff", b"b"]) == ["", "\ufffda", "\ufffd", "b", ""]


@pytest.mark.parametrize(
    ("strip", "expected"), [(True, "Hello world 's."), (False, " Hello world 's.")], ids=["start", "continuation"]
)
def test_only_the_first_space_is_stripped_and_only_at_the_start_of_a_text(strip: bool, expected: str) -> None:
    pieces = [None, b" Hello", b" world", b"", b" 's", None, b"."]
    assert "".join(stream(pieces, strip_leading_space=strip)) == expected


def test_special_tokens_and_ids_outside_the_vocabulary_have_no_text() -> None:
    detokenizer = Detokenizer(Vocabulary([b"\xc4", None, b"\x8d"]))
    assert [detokenizer.feed(token_id) for token_id in (0, 1, 99, 2)] == ["", "", "", "č"]
