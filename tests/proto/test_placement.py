"""Where copies go in single cases, what gives way to them, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from naru_proto.placement import (
    CopyMove,
    Held,
    HeldState,
    Near,
    Want,
    WorkerSlot,
    choose_load,
    defragment,
    drift,
    place,
)

POOL = ("p",)


def slot(worker_id: str, budget_bytes: int = 100, *, pool: str = "p", **fields: Any) -> WorkerSlot:
    """A worker; what it holds is in its used bytes unless they are given."""
    holding = fields.get("holding", {})
    used = fields.pop("used_bytes", sum(held.booked_bytes for held in holding.values()))
    return WorkerSlot(worker_id, pool, budget_bytes=budget_bytes, used_bytes=used, **fields)


def want(model: str = "m", num_bytes: int = 10, num_copies: int = 1, **fields: Any) -> Want:
    return Want(model, POOL, num_copies, num_bytes, **fields)


@pytest.mark.parametrize(
    ("wants", "slots", "placed"),
    [
        ([want()], [slot("a", 50), slot("b", 20), slot("c", 9)], {"m": ("b",)}),
        ([want("s", 10), want("l", 20)], [slot("a", 50), slot("b", 20)], {"l": ("b",), "s": ("a",)}),
        ([want(num_copies=2)], [slot("a", pool="q"), slot("b"), slot("c", is_leaving=True)], {"m": ("b",)}),
        ([want(barred=frozenset("a"))], [slot("a"), slot("b")], {"m": ("b",)}),
        ([want(num_bytes=0)], [slot("a", 50), slot("b", 80), slot("c", 20)], {"m": ("b",)}),
        ([want("m", 0), want("n", 0)], [slot("a", 50), slot("b", 80)], {"m": ("b",), "n": ("a",)}),
        ([want()], [slot("a", 0), slot("b", 9)], {"m": ("a",)}),
        ([want()], [slot("a", 0), slot("b", 10)], {"m": ("b",)}),
        ([want()], [slot("a", holding={"x": Held(HeldState.COMING, 95, is_booked=False)}), slot("b")], {"m": ("b",)}),
        ([want()], [slot("a", failed=frozenset("m")), slot("b", 200)], {"m": ("b",)}),
        ([want(num_copies=0)], [slot("a")], {"m": ()}),
    ],
    ids=[
        "the least room", "the largest first", "its pool, and no leaving worker", "barred", "the most room",
        "two of unknown size part", "an unknown budget", "a known budget that suffices", "a load under way counts",
        "not where it failed", "none wanted",
    ],
)  # fmt: skip
def test_where_copies_go(wants: list[Want], slots: list[WorkerSlot], placed: dict[str, tuple[str, ...]]) -> None:
    found = place(wants, slots)
    assert {model: found.workers(model) for model in found.copies} == placed
    assert place(wants[::-1], slots[::-1]) == found


def test_the_copies_that_stay_are_the_ready_and_busy_ones() -> None:
    states = [
        Held(HeldState.FAILED),
        Held(HeldState.RESTING),
        Held(HeldState.COMING),
        Held(num_in_flight=0, last_used_s=5),
        Held(num_in_flight=0, last_used_s=9),
        Held(num_in_flight=3),
    ]
    slots = [slot(f"w{index}", holding={"m": held}) for index, held in enumerate(states)]
    for count in range(1, 7):
        found = place([want(num_copies=count)], slots)
        assert found.workers("m") == tuple(f"w{index}" for index in range(6 - count, 6))
        assert not any(copy.is_new for copy in found.copies["m"])
    assert place([want(num_copies=9)], slots).unplaced[0].num_missing == 3


def test_a_second_copy_goes_to_another_failure_domain_while_one_can_take_it() -> None:
    zone: dict[str, Any] = {"domains": {"zone": "x"}}
    slots = [
        slot("a", holding={"m": Held(num_bytes=10)}, node="n1", **zone),
        slot("b", 15, node="n2", **zone),
        slot("c", 90, node="n1", domains={"zone": "y"}),
    ]
    by_zone = want(num_copies=2, spread_key="zone")
    assert place([by_zone], slots).workers("m") == ("a", "c")
    assert place([want(num_copies=2)], slots).workers("m") == ("a", "b"), "by node"
    full = [*slots[:2], slot("c", 9, node="n1", domains={"zone": "y"})]
    found = place([by_zone], full)
    assert found.workers("m") == ("a", "b")
    assert "'x' has 1" in " ".join(found.copies["m"][1].reasons)


def test_what_is_near_is_preferred_to_a_tight_fit() -> None:
    host, disk = {"m": Near.HOST}, {"m": Near.DISK}
    tight = slot("tight", 10, node="n0")
    on_disk, in_host = slot("disk", 90, near=disk, node="n1"), slot("host", 90, near=host, node="n2")
    neighbour = slot("neighbour", 50, node="n1")
    full = slot("full", 9, near=disk, node="n1")
    assert place([want()], [tight, on_disk, in_host]).workers("m") == ("host",)
    assert place([want()], [tight, on_disk]).workers("m") == ("disk",)
    assert place([want()], [tight, full, neighbour]).workers("m") == ("neighbour",)
    nowhere = slot("neighbour", 50), slot("full", 9, near=disk)
    assert place([want()], [tight, *nowhere]).workers("m") == ("tight",), "nodes that are not told are not shared"
    assert "host memory" in choose_load(want(), [tight, in_host]).reasons[1]


def test_a_cut_copy_takes_its_share_of_each_accelerator() -> None:
    two, four = slot("two", 200, num_accelerators=2), slot("four", 200, num_accelerators=4)
    assert place([want(num_bytes=120, num_accelerators=4)], [two, four]).workers("m") == ("four",)
    assert place([want(num_bytes=120, num_accelerators=2)], [two, four]).workers("m") == ("two",)
    # 50 bytes on each of four: one copy of 60 fits on none of them, though 200 are free.
    assert place([want(num_bytes=60)], [four]).unplaced[0].reason.startswith("a copy needs 0.0 MB")
    # Copies lie on the first ones, which have 10 left: those that no copy is on yet help nobody.
    held = {"x": Held(num_bytes=80, num_accelerators=2, num_in_flight=1)}
    busy = slot("four", 200, num_accelerators=4, holding=held)
    assert place([want(num_bytes=40, num_accelerators=4)], [busy]).workers("m") == ("four",)
    assert place([want(num_bytes=20, num_accelerators=2)], [busy]).workers("m") == ("four",)
    assert place([want(num_bytes=24, num_accelerators=2)], [busy]).workers("m") == ()
    assert place([want(num_bytes=44, num_accelerators=4)], [busy]).workers("m") == ()
    found = place([want(num_accelerators=8)], [two, four]).unplaced[0]
    assert found.reason == "a copy needs 8 accelerators; the most that a worker has is 4, on 'four'"


def test_the_cheapest_idle_copies_that_nobody_must_have_give_way() -> None:
    def held(num_bytes: int, **fields: Any) -> Held:
        return Held(num_bytes=num_bytes, **fields)

    holding = {
        "pinned": held(20, is_pinned=True),
        "busy": held(20, num_in_flight=1),
        "wanted": held(20, is_wanted=True),
        "dear": held(15, priority=200),
        "used": held(10, last_used_s=9),
        "old": held(10, last_used_s=1),
    }
    full = slot("a", 95, holding=holding)
    for num_bytes, victims in (
        (10, ("old",)),
        (20, ("old", "used")),
        (25, ("dear", "old")),
        (35, ("dear", "old", "used")),
    ):
        (copy,) = place([want(num_bytes=num_bytes)], [full]).copies["m"]
        assert copy.victims == victims, num_bytes
    missing = place([want(num_bytes=36_000_000)], [full]).unplaced
    assert missing[0].num_missing == 1
    assert place([want(num_bytes=36)], [full]).workers("m") == ()
    # What is wanted is no victim, however idle.
    both = place([want(num_bytes=35), want("old")], [full])
    assert both.workers("m") == ()
    assert both.workers("old") == ("a",)
    # Free room comes before anybody leaves.
    assert place([want(num_bytes=10)], [full, slot("b")]).workers("m") == ("b",)


def test_what_does_not_fit_is_told_in_numbers() -> None:
    million = 10**6
    holding = {"x": Held(num_bytes=3 * million), "y": Held(num_bytes=6 * million, num_in_flight=1)}
    slots = [slot("a", 10 * million, holding=holding), slot("b", 3 * million)]
    (missing,) = place([want(num_bytes=5 * million)], slots).unplaced
    assert missing.reason == ("a copy needs 5.0 MB; the most room is 3.0 MB, of 3.0 MB on 'b'")
    (missing,) = place([want(num_bytes=5 * million)], slots[:1]).unplaced
    assert missing.reason == (
        "a copy needs 5.0 MB; the most room is 1.0 MB, 4.0 MB with idle copies gone that nobody must have, "
        "of 10.0 MB on 'a'"
    )
    assert place([want()], [slot("a", pool="q")]).unplaced[0].reason == "pools p: there is no worker"
    leaving = [slot("a", is_leaving=True), slot("b", holding={"m": Held()})]
    assert place([want(num_copies=2)], leaving).unplaced[0].reason == (
        "pools p: of 2 workers 1 have a copy already, 1 are leaving"
    )


def test_a_model_wanted_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        place([want(), want()], [])


def test_a_cold_model_comes_up_where_it_will_soonest() -> None:
    idle, busy = Held(num_bytes=95), Held(num_bytes=95, num_in_flight=2)
    kept = Held(num_bytes=95, is_wanted=True)
    pinned = slot("pinned", holding={"x": Held(num_bytes=95, is_pinned=True)})
    steps = [
        pinned,
        slot("busy", holding={"x": busy}),
        slot("kept", holding={"x": kept}),
        slot("idle", holding={"x": idle}),
        slot("free", 50),
        slot("near", 50, near={"m": Near.DISK}),
        slot("coming", holding={"m": Held(HeldState.COMING, 10)}),
        slot("ready", holding={"m": Held(num_bytes=10)}),
    ]
    for count in range(2, len(steps) + 1):
        found = choose_load(want(), steps[:count])
        assert found.worker_id == steps[count - 1].worker_id
        assert choose_load(want(), steps[:count][::-1]) == found
        assert found.victims == (("x",) if found.worker_id in ("kept", "idle") else ())
    nowhere = choose_load(want(), [pinned])
    assert (nowhere.worker_id, len(nowhere.reasons)) == ("", 1)
    assert choose_load(want(num_bytes=10**6), steps[:5]).worker_id == ""


def test_a_cold_model_goes_where_most_is_free_unless_it_takes_most_of_a_worker() -> None:
    slots = [slot("tight", 60), slot("wide", 100), slot("middle", 80)]
    assert choose_load(want(num_bytes=20), slots).worker_id == "wide"
    assert choose_load(want(num_bytes=55), slots).worker_id == "tight"


def test_a_cold_model_goes_to_its_image_in_host_memory_if_only_spare_copies_must_leave() -> None:
    free = slot("free")
    for copy, chosen in ((Held(num_bytes=95), "host"), (Held(num_bytes=95, is_wanted=True), "free")):
        in_host = slot("host", holding={"x": copy}, near={"m": Near.HOST})
        assert choose_load(want(), [free, in_host]).worker_id == chosen
    assert place([want()], [free, slot("host", holding={"x": Held(num_bytes=95)}, near={"m": Near.HOST})]).workers(
        "m"
    ) == ("free",), "a lasting place is taken without anybody leaving"


def test_drift_tells_what_is_missing_too_many_and_out_of_place() -> None:
    slots = [
        slot("a", holding={"m": Held(last_used_s=5), "ok": Held()}),
        slot("b", holding={"m": Held(HeldState.COMING)}),
        slot("c", holding={"m": Held(num_in_flight=1), "n": Held()}, is_leaving=True),
        slot("d", holding={"m": Held(num_in_flight=1)}),
    ]
    many, none = drift([want("ok"), want("m"), want("n", num_copies=2)], slots)
    assert (many.model, many.num_ready, many.num_coming, many.num_missing) == ("m", 2, 1, 0)
    assert (many.surplus, many.misplaced) == (("b", "a"), ("c",))
    assert (none.model, none.num_missing, none.misplaced) == ("n", 2, ("c",))
    assert none.reasons[0] == "2 of 2 copies are missing"
    assert drift([want("ok")], slots) == ()


def test_idle_copies_move_to_make_room_with_the_fewest_bytes() -> None:
    def held(num_bytes: int, **fields: Any) -> Held:
        return Held(num_bytes=num_bytes, **fields)

    slots = [
        slot("a", holding={"big": held(40), "small": held(25), "busy": held(20, num_in_flight=1)}),
        slot("b", holding={"other": held(60)}),
        slot("c", 30, holding={"pin": held(20, is_pinned=True)}),
    ]
    wants = [want(n, size) for n, size in (("big", 40), ("small", 25), ("busy", 20), ("other", 60), ("pin", 20))]
    wanted = [*wants, want("m", 45)]
    found = defragment(wanted, slots)
    assert (found.for_model, found.worker_id) == ("m", "a")
    assert found.moves == (CopyMove("big", "a", "b", 40),), "15 are free, 30 more are needed"
    assert defragment(wanted[::-1], slots[::-1]) == found
    two = [*wants, want("m", 75)]
    assert defragment(two, slots).moves == (), "the second one has no place"
    assert defragment(wanted, slots, max_moves=0).moves == ()
    assert defragment(wants, slots).moves == (), "nothing is missing"
    assert defragment([*wants, want("m", 10)], slots).moves == (), "what fits is placed first"
