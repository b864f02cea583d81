"""The index of route keys against plain sets, under updates that are repeated, late, damaged or cut off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_router.core.prefix_index import DamagedUpdate, PrefixIndex

KEYS = [bytes([65 + i]) * 16 for i in range(8)]
SOME = st.lists(st.sampled_from(KEYS), max_size=6).map(b"".join)
UPDATES = st.fixed_dictionaries(
    {
        "worker_id": st.sampled_from(["w0", "w1", "w2"]),
        "model": st.sampled_from(["m", "n"]),
        "epoch": st.integers(0, 3),
        "is_snapshot": st.booleans(),
        "added": st.one_of(SOME, SOME, SOME.map(lambda packed: packed + b"?")),
        "removed": SOME,
    }
)
ACTIONS = st.one_of(
    UPDATES,
    UPDATES,
    UPDATES,
    st.tuples(st.just("void"), st.sampled_from(["w0", "w1", "w2"]), st.sampled_from(["m", "n"])),
    st.tuples(st.just("lost"), st.sampled_from(["w0", "w1", "w2"]), st.just("")),
)


def cut(packed: bytes) -> list[bytes]:
    return [packed[start : start + 16] for start in range(0, len(packed), 16)]


class Plain:
    """The same, as one would write it down."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], tuple[int, set[bytes]]] = {}

    def update(
        self, worker_id: str, model: str, epoch: int, *, is_snapshot: bool, added: bytes, removed: bytes
    ) -> bool:
        known = self.held.get((worker_id, model))
        if known is not None and epoch < known[0]:
            return False
        if len(added) % 16:
            self.held.pop((worker_id, model), None)
            return False
        if known is None and not is_snapshot:
            return False
        before = set() if known is None or is_snapshot or epoch != known[0] else known[1]
        self.held[worker_id, model] = (epoch, (before - set(cut(removed))) | set(cut(added)))
        return True

    def match(self, model: str, keys: list[bytes]) -> dict[str, int]:
        found = {}
        for (worker_id, name), (_, held) in self.held.items():
            count = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            if name == model and count:
                found[worker_id] = count
        return found


@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=40), st.permutations(KEYS))
def test_it_says_what_plain_sets_say_whatever_is_sent(
    actions: list[dict[str, object] | tuple[str, str, str]], prompt: list[bytes]
) -> None:
    index, plain = PrefixIndex(), Plain()
    for action in actions:
        if isinstance(action, tuple):
            name, worker_id, model = action
            if name == "void":
                index.void(worker_id, model)
            else:
                index.void_worker(worker_id)
            for key in [k for k in plain.held if k[0] == worker_id and model in ("", k[1])]:
                del plain.held[key]
        else:
            try:
                index.update(**action)  # type: ignore[arg-type]
                is_taken = True
            except DamagedUpdate:
                is_taken = False
            assert is_taken == plain.update(**action)  # type: ignore[arg-type]
        index.check()
        for model in ("m", "n"):
            for keys in (prompt, prompt[:3], KEYS, []):
                assert index.match(model, keys) == plain.match(model, keys)
    for worker_id in ("w0", "w1", "w2"):
        expected = sum(len(held) for (owner, _), (_, held) in plain.held.items() if owner == worker_id)
        assert index.num_worker_keys(worker_id) == expected


def many(first: int, count: int) -> bytes:
    return b"".join(b"%16d" % number for number in range(first, first + count))


def test_a_worker_that_tells_too_much_loses_its_own_oldest_keys() -> None:
    index = PrefixIndex(max_keys=1000, max_worker_keys=10)
    index.update("calm", "m", 1, is_snapshot=True, added=many(0, 5))
    index.update("loud", "m", 1, is_snapshot=True, added=many(0, 8))
    index.update("loud", "m", 1, is_snapshot=False, added=many(100, 4))
    index.check()
    assert (index.num_worker_keys("loud"), index.num_worker_keys("calm"), index.num_dropped) == (10, 5, 2)
    assert index.match("m", cut(many(0, 5))) == {"calm": 5}
    assert index.match("m", cut(many(2, 6))) == {"loud": 6, "calm": 3}
    assert index.match("m", cut(many(100, 4))) == {"loud": 4}


def test_all_together_are_bounded_and_the_one_that_told_most_pays() -> None:
    index = PrefixIndex(max_keys=640, max_worker_keys=600)
    for number in range(4):
        index.update(f"calm{number}", "m", 1, is_snapshot=True, added=many(0, 20))
    for number in range(200):
        index.update("loud", f"m{number % 7}", 1, is_snapshot=number < 7, added=many(number * 5, 5))
        assert index.num_keys <= 640
        index.check()
    assert [index.num_worker_keys(f"calm{number}") for number in range(4)] == [20] * 4
    assert index.num_dropped == 1000 - index.num_worker_keys("loud") > 0


def test_void_keys_are_swept_by_what_comes_and_never_pile_up() -> None:
    index = PrefixIndex(max_keys=10_000)
    for epoch in range(50):
        index.update("w", "m", epoch, is_snapshot=True, added=many(epoch, 500))
        index.check()
    assert index._num_void <= 1500
    index.void_worker("w")
    for number in range(1, 1000):
        index.update("x", "other", number, is_snapshot=True, added=many(0, 1))
    assert (index._num_void <= 2, "m" in index._tables, index.match("m", cut(many(49, 5)))) == (True, False, {})


def test_epochs_are_told_and_another_one_voids_even_without_a_snapshot() -> None:
    index = PrefixIndex()
    assert index.epoch("w", "m") is None
    index.update("w", "m", 3, is_snapshot=True, added=many(0, 3))
    index.update("w", "m", 4, is_snapshot=False, added=many(1, 1))
    assert index.epoch("w", "m") == 4
    assert index.match("m", cut(many(0, 3))) == {}
    assert index.match("m", cut(many(1, 3))) == {"w": 1}
    with pytest.raises(DamagedUpdate, match="epoch 3"):
        index.update("w", "m", 3, is_snapshot=True)
    # A worker that starts anew begins to count anew: its stream broke before.
    index.void_worker("w")
    index.update("w", "m", 1, is_snapshot=True, added=many(0, 3))
    assert index.match("m", cut(many(0, 3))) == {"w": 3}
