"""Route keys: what they tell apart, what tenants share of them, and how they travel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_proto.route_keys import (
    BOUNDARIES,
    MAX_KEYS,
    boundaries,
    key_root,
    keys_of_ids,
    keys_of_text,
    pack_keys,
    shared_key_root,
    unpack_keys,
)

ROOT = key_root(b"salt", "model@1")
OTHER = key_root(b"other", "model@1")
SHARED = shared_key_root("model@1")


def test_boundaries_grow_and_end_after_256_keys() -> None:
    assert BOUNDARIES[:2] == (64, 128)
    assert BOUNDARIES[63:65] == (4096, 4352)
    assert BOUNDARIES[127:129] == (20480, 21504)
    assert BOUNDARIES[191:193] == (86016, 90112)
    assert (BOUNDARIES[-1], len(BOUNDARIES)) == (348160, MAX_KEYS)
    assert len(keys_of_text(bytes(1_000_000), ROOT)) == MAX_KEYS


@given(st.integers(0, 400_000))
def test_only_whole_chunks_have_a_key(num_bytes: int) -> None:
    ends = boundaries(num_bytes)
    assert all(end <= num_bytes for end in ends)
    assert len(ends) == MAX_KEYS or BOUNDARIES[len(ends)] > num_bytes


def test_roots_differ_by_salt_model_adapter_and_where_fields_meet() -> None:
    roots = [
        key_root(b"", "m"),
        key_root(b"s", "m"),
        key_root(b"", "n"),
        key_root(b"", "m", "a"),
        key_root(b"", "ma"),
        key_root(b"", "", "ma"),
        shared_key_root("m"),
        shared_key_root("m", "a"),
    ]
    assert len(set(roots)) == len(roots)


@given(st.binary(min_size=64, max_size=6000), st.data())
def test_keys_agree_exactly_up_to_the_first_chunk_that_differs(text: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
    before, after = keys_of_text(text, ROOT), keys_of_text(changed, ROOT)
    num_equal = len([end for end in boundaries(len(text)) if end <= place])
    assert before[:num_equal] == after[:num_equal]
    assert not set(before[num_equal:]) & set(after[num_equal:])
    assert len(set(before)) == len(before)


@given(st.binary(min_size=0, max_size=3000), st.integers(-5, 4000))
def test_tenants_share_the_keys_wholly_inside_the_shared_part_and_no_other(text: bytes, num_shared_bytes: int) -> None:
    one = keys_of_text(text, ROOT, shared_root=SHARED, shared_prefix_bytes=num_shared_bytes)
    two = keys_of_text(text, OTHER, shared_root=SHARED, shared_prefix_bytes=num_shared_bytes)
    num_shared = len([end for end in boundaries(len(text)) if end <= num_shared_bytes])
    assert one[:num_shared] == two[:num_shared]
    assert not set(one[num_shared:]) & set(two)
    # What all share is nobody's own: not even of those without a salt.
    assert not set(one[:num_shared]) & set(keys_of_text(text, key_root(b"", "model@1")))


def test_keys_of_ids_stand_for_four_bytes_each() -> None:
    ids = list(range(40))
    assert len(keys_of_ids(ids, ROOT)) == 2
    assert keys_of_ids(ids, ROOT)[0] == keys_of_ids([*ids[:16], 99], ROOT)[0]
    assert keys_of_ids(ids, ROOT) == keys_of_text(b"".join(i.to_bytes(4, "little") for i in ids), ROOT)


@given(st.binary(max_size=20_000))
def test_keys_travel_packed_and_come_back(text: bytes) -> None:
    keys = keys_of_text(text, ROOT)
    assert unpack_keys(pack_keys(keys)) == keys


def test_packed_keys_that_are_none_are_refused_by_name() -> None:
    for packed in (b"x" * 15, b"x" * 17, b"x" * (16 * MAX_KEYS + 16)):
        with pytest.raises(InvalidRequest, match="some_field has") as caught:
            unpack_keys(packed, param="some_field")
        assert caught.value.param == "some_field"
    assert len(unpack_keys(b"x" * 16 * 1000, max_keys=None)) == 1000
