"""Which model answers to a name for whom: hidden ones do not exist, splits keep weights, fallbacks their order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import ModelNotFound
from naru_proto.registry import ModelRecord
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.route_map import RouteMap
from naru_router.core.tenancy.picking import pick_of

A, B, NARROW = Caller("a"), Caller("b"), Caller("n", models=("open*", "small"))


def board(*records: ModelRecord) -> RouteMap:
    return RouteMap({record.name: record for record in records})


def entry(name: str, **fields: Any) -> ModelRecord:
    return ModelRecord(name, "file:///", 1, **fields)


MAP = board(
    entry("open", aliases=("o",)), entry("secret", allow=("a",), aliases=("s",)), entry("big", aliases=("small",))
)


@pytest.mark.parametrize(
    ("caller", "names", "entries"),
    [
        (A, ["big", "o", "open", "s", "secret", "small"], ["big", "open", "secret"]),
        (B, ["big", "o", "open", "small"], ["big", "open"]),
        (ANYONE, ["big", "o", "open", "small"], ["big", "open"]),
        (NARROW, ["big", "o", "open", "small"], ["big", "open"]),
        (Caller("n", models=("none",)), [], []),
        (None, ["big", "o", "open", "s", "secret", "small"], ["big", "open", "secret"]),
    ],
    ids=["named", "another", "nobody in particular", "by patterns", "by patterns that match nothing", "unfiltered"],
)
def test_a_caller_sees_what_model_and_tenant_both_allow(
    caller: Caller | None, names: list[str], entries: list[str]
) -> None:
    assert MAP.names(caller) == names
    assert MAP.entries(caller) == entries


@pytest.mark.parametrize("name", ["secret", "s"])
def test_a_hidden_model_is_refused_in_the_words_of_one_that_does_not_exist(name: str) -> None:
    assert MAP.resolve(name, A).entry.name == "secret"
    with pytest.raises(ModelNotFound) as hidden:
        MAP.resolve(name, B)
    with pytest.raises(ModelNotFound) as absent:
        board(*(each for each in MAP.models.values() if each.name != "secret")).resolve(name, B)
    assert hidden.value.message == absent.value.message
    assert hidden.value.message == f"the model {name!r} does not exist; known models: big, o, open, small"


SPLIT = board(
    entry("chat", split=(("v1", 90), ("v2", 10), ("gone", 50), ("hidden", 50), ("v1@r", 50))),
    entry("v1", target="v1@r"),
    entry("v1@r", is_revision=True),
    entry("v2", split=(("v1", 1),)),
    entry("hidden", allow=("other",)),
)


def test_requests_are_split_by_weight_among_the_models_a_caller_may_use() -> None:
    picks = [SPLIT.resolve("chat", A, (i + 0.5) / 1000) for i in range(1000)]
    assert [sum(each.entry.name == name for each in picks) for name in ("v1", "v2")] == [900, 100]
    assert picks[0].model.name == "v1@r" and picks[-1].model.name == "v2"
    assert {each.asked.name for each in picks if each.asked is not None} == {"chat"}
    assert picks[0].answers_as == "v1"
    other = [SPLIT.resolve("chat", Caller("other"), (i + 0.5) / 150).entry.name for i in range(150)]
    assert [other.count(name) for name in ("v1", "v2", "hidden")] == [90, 10, 50]


def test_one_that_splits_its_requests_answers_itself_where_no_other_can() -> None:
    alone = board(entry("chat", split=(("gone", 1), ("hidden", 1))), entry("hidden", allow=("x",)))
    service = alone.resolve("chat", A, 0.7)
    assert (service.entry.name, service.asked, service.answers_as) == ("chat", None, "")
    zero = board(entry("chat", split=(("v", 0), ("chat", 0))), entry("v"))
    assert zero.resolve("chat", A, 0.7).entry.name == "chat"
    both = board(entry("chat", split=(("v", 1), ("chat", 1))), entry("v"))
    assert [both.resolve("chat", A, pick).answers_as for pick in (0.4, 0.6)] == ["v", ""]


@given(st.binary(max_size=64), st.binary(max_size=80))
def test_a_key_always_picks_the_same_number_below_one(key: bytes, seed: bytes) -> None:
    assert 0.0 <= pick_of(key, seed) < 1.0
    assert pick_of(key, seed) == pick_of(key, seed)


def test_keys_spread_and_seeds_move_them() -> None:
    low = sum(pick_of(f"session-{i}".encode(), b"s") < 0.1 for i in range(10_000))
    assert 850 < low < 1150
    assert pick_of(b"k", b"s") != pick_of(b"k", b"t")


def test_more_weight_for_one_side_takes_nobody_away_from_it() -> None:
    def sides(weight: int) -> list[str]:
        split = board(entry("chat", split=(("v2", weight), ("v1", 100 - weight))), entry("v1"), entry("v2"))
        return [split.resolve("chat", A, i / 500).entry.name for i in range(500)]

    before, after = sides(10), sides(30)
    assert all(new == "v2" for old, new in zip(before, after, strict=True) if old == "v2")


FALLBACKS = board(
    entry("main", fallbacks=("first", "gone", "hidden", "lost", "main", "second"), split=(("main", 1), ("first", 1))),
    entry("first", fallbacks=("deep",)),
    entry("second", target="second@r"),
    entry("second@r", is_revision=True),
    entry("hidden", allow=("other",)),
    entry("lost", target="lost@r"),
    entry("deep"),
)


def test_fallbacks_come_in_order_one_level_deep_and_never_lead_to_a_hidden_model() -> None:
    service = FALLBACKS.resolve("main", A, 0.0)
    found = FALLBACKS.fallbacks_of(service, A)
    assert [(each.model.name, each.answers_as) for each in found] == [("first", "first"), ("second@r", "second")]
    allowed = FALLBACKS.fallbacks_of(service, Caller("other"))
    assert [each.entry.name for each in allowed] == ["first", "hidden", "second"]
    # The other side of its split was picked: the entry itself may stand in.
    first = FALLBACKS.resolve("main", A, 0.9)
    assert [each.entry.name for each in FALLBACKS.fallbacks_of(first, A)] == ["main", "second"]
    assert FALLBACKS.fallbacks_of(FALLBACKS.resolve("first", A), A)[0].entry.name == "deep"


def test_a_name_has_not_moved_while_what_serves_it_is_one_of_its_models() -> None:
    for model in ("main", "first", "second@r", "hidden"):
        assert not FALLBACKS.has_moved("main", model)
    assert FALLBACKS.has_moved("main", "main@old")
    assert FALLBACKS.has_moved("first", "first@old") and not FALLBACKS.has_moved("first", "deep")
    moved = dataclasses.replace(FALLBACKS.models["second"], target="second@s")
    newer = RouteMap({**FALLBACKS.models, "second": moved, "second@s": entry("second@s", is_revision=True)})
    assert newer.has_moved("main", "second@r")
