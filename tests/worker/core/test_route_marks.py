"""Route keys of a prefix cache: they hang on blocks, are told as net changes, and are bounded by the blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.route_marks import MAX_KEYS_PER_BLOCK, KeyChanges, RouteMarks

BLOCKS = st.sampled_from([b"A", b"B", b"C"])
KEYS = st.lists(st.sampled_from([b"1", b"2", b"3", b"4"]), max_size=3)
ACTIONS: st.SearchStrategy[tuple[str, bytes, list[bytes]]] = st.one_of(
    st.tuples(st.just("mark"), BLOCKS, KEYS),
    st.tuples(st.just("forget"), BLOCKS, st.just([])),
    st.tuples(st.just("clear"), st.just(b""), st.just([])),
    st.tuples(st.just("take"), st.just(b""), st.just([])),
)


@given(st.lists(ACTIONS, max_size=40))
def test_what_is_told_adds_up_to_what_is_held(actions: list[tuple[str, bytes, list[bytes]]]) -> None:
    marks = RouteMarks()
    expected: dict[bytes, bytes] = {}
    told: set[bytes] = set()
    for name, block, keys in [*actions, ("take", b"", [])]:
        if name == "mark":
            marks.mark(block, keys)
            expected |= dict.fromkeys(keys, block)
        elif name == "forget":
            marks.forget(block)
            expected = {key: held for key, held in expected.items() if held != block}
        elif name == "clear":
            marks.clear()
            expected = {}
        else:
            changes = marks.take()
            assert told.issuperset(changes.removed)
            assert told.isdisjoint(changes.added)
            told = (told - set(changes.removed)) | set(changes.added)
            assert told == expected.keys()
        marks.check()
        assert len(marks) == len(expected)


def test_made_up_keys_on_one_block_push_one_another_out() -> None:
    marks = RouteMarks()
    for number in range(10 * MAX_KEYS_PER_BLOCK):
        marks.mark(b"block", [b"%d" % number])
        marks.check()
    newest = {b"%d" % number for number in range(9 * MAX_KEYS_PER_BLOCK, 10 * MAX_KEYS_PER_BLOCK)}
    assert set(marks.take().added) == newest
    marks.forget(b"block")
    assert set(marks.take().removed) == newest
    assert marks.take() == KeyChanges()
