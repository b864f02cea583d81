"""What is being computed counts for those that begin alike, as long as it is being computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_proto.route_keys import key_root, keys_of_text
from naru_router.core.pending_keys import MAX_ALIKE, PendingKeys

ROOT = key_root(b"", "m")


def keys(text: str) -> tuple[bytes, ...]:
    return keys_of_text(text.encode(), ROOT)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)), max_size=12),
    st.integers(0, 9),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 3)),
)
def test_the_longest_common_beginning_counts(
    sent: list[tuple[str, int, int]], num_same: int, held: dict[str, int]
) -> None:
    pending, asked = PendingKeys(), keys("s" * 64 * 9)
    expected = dict(held)
    for number, (worker_id, num_alike, num_other) in enumerate(sent):
        pending.add(str(number), worker_id, keys("s" * 64 * num_alike + "x" * 64 * num_other))
        expected[worker_id] = max(expected.get(worker_id, 0), num_alike)
    assert pending.with_pending(asked, held) == {worker: count for worker, count in expected.items() if count}


def test_what_has_ended_counts_no_more() -> None:
    pending, one = PendingKeys(), keys("s" * 640)
    pending.add("1", "a", one)
    assert pending.with_pending(one, {}) == {"a": 10}
    for _ in range(2):
        pending.remove("1", one)
    assert pending.with_pending(one, {}) == {}


def test_a_prompt_without_keys_is_no_concern() -> None:
    pending = PendingKeys()
    pending.add("1", "a", ())
    pending.remove("1", ())
    assert pending.with_pending((), {"a": 1}) == {"a": 1}


def test_very_many_alike_are_forgotten_oldest_first() -> None:
    pending, one = PendingKeys(), keys("s" * 64)
    for number in range(MAX_ALIKE + 1):
        pending.add(str(number), f"w{number}", one)
    assert set(pending.with_pending(one, {})) == {f"w{number}" for number in range(1, MAX_ALIKE + 1)}
