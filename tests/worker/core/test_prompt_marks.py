"""From byte offsets of a text to its tokens and blocks: exact where tokens are the text's own bytes, else silent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_proto.route_keys import boundaries
from naru_worker.core.prompt_marks import NO_MARKS, Vocabulary, marks_of_ids, marks_of_text, token_ends

SPECIAL = {900: "<s>", 901: "<end>"}
WORDS = {i: bytes([97 + i % 26]) * (1 + i % 9) for i in range(200)}
SPACED = {500: b" hi", 501: b" there", 502: b"", 503: b"?"}
VOCABULARY = Vocabulary(
    lambda token_id: SPECIAL[token_id].encode() if token_id in SPECIAL else (WORDS | SPACED)[token_id], SPECIAL.get
)
BLOCK = 4


def spelled(ids: list[int]) -> bytes:
    return b"".join(VOCABULARY.token_bytes(i) for i in ids)


def keys_for(text: bytes) -> list[bytes]:
    return [b"key %12d" % end for end in boundaries(len(text))]


@given(st.lists(st.one_of(st.integers(0, 199), st.sampled_from([900, 901])), max_size=300), st.booleans())
def test_each_key_hangs_on_the_last_block_wholly_inside_its_boundary(ids: list[int], has_bos: bool) -> None:
    text = spelled(ids)
    token_ids = [900, *ids] if has_bos and not text.startswith(b"<s>") else ids
    before = len(token_ids) - len(ids)
    marks = marks_of_text(text, token_ids, VOCABULARY, keys_for(text), 0, BLOCK)
    expected: dict[int, list[bytes]] = {}
    for end, key in zip(boundaries(len(text)), keys_for(text), strict=True):
        num_inside = max(n for n in range(len(ids) + 1) if len(spelled(ids[:n])) <= end) + before
        expected.setdefault(max(0, num_inside // BLOCK - 1), []).append(key)
    assert marks.keys == {index: tuple(keys) for index, keys in expected.items()}
    assert marks.num_shared_blocks == 0


def test_a_space_that_the_tokenizer_put_before_a_text_is_no_byte_of_it() -> None:
    assert token_ends(b"hi there", [500, 501], VOCABULARY) == [2, 8]
    assert token_ends(b"hi there", [900, 500, 501], VOCABULARY) == [0, 2, 8]
    assert token_ends(b"<s>hi there", [900, 500, 501], VOCABULARY) == [3, 5, 11]


def test_what_follows_a_place_where_the_text_was_changed_has_no_ends() -> None:
    assert token_ends(b"hi  there", [500, 501], VOCABULARY) == [2]
    assert token_ends(b"hi!", [500, 503], VOCABULARY) == [2]
    assert token_ends("é".encode(), [503], VOCABULARY) == []
    assert token_ends(b"hi", [500, 901], VOCABULARY) == [2]
    text = b"hi" + b"a" * 200
    assert marks_of_text(text, [500, 503, *range(60)], VOCABULARY, keys_for(text), 0, BLOCK) == NO_MARKS


def test_a_prompt_without_a_full_block_holds_no_key() -> None:
    text = b"i" * 9 * 3
    assert marks_of_text(text * 3, [8] * 3, VOCABULARY, keys_for(text * 3), 0, BLOCK).keys == {}
    assert marks_of_ids(15, [b"k"], 16).keys == {}
    assert marks_of_ids(16, [b"k", b"l"], 16).keys == {0: (b"k",)}
    assert marks_of_ids(40, [b"k", b"l"], 16).keys == {0: (b"k",), 1: (b"l",)}


def test_more_keys_than_the_text_has_chunks_are_ignored() -> None:
    text = spelled([0] * 70)
    marks = marks_of_text(text, [0] * 70, VOCABULARY, [b"%d" % i for i in range(256)], 0, BLOCK)
    assert marks.keys == {15: (b"0",)}


@given(st.lists(st.integers(0, 199), max_size=60), st.lists(st.integers(0, 199), max_size=30), st.integers(0, 40))
def test_what_is_shared_ends_at_a_special_token_whatever_follows(system: list[int], rest: list[int], cut: int) -> None:
    # The shared part may end anywhere: what its last tokens are may tell of what follows them.
    ids = [*system, 901, *rest]
    num_bytes = len(spelled([*system, 901])) + min(cut, len(spelled(rest)))
    marks = marks_of_text(spelled(ids), ids, VOCABULARY, [], num_bytes, BLOCK)
    assert marks.num_shared_blocks == (len(system) + 1) // BLOCK
    marks = marks_of_text(spelled(ids), ids, VOCABULARY, [], len(spelled(system)), BLOCK)
    assert marks.num_shared_blocks == 0
