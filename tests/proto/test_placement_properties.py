"""What holds of placement for all wants and workers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from naru_proto.placement import Held, HeldState, Near, Placement, Want, WorkerSlot, choose_load, defragment, place
from naru_proto.placement.room import is_eligible, room_bytes

MODELS = [f"m{index}" for index in range(6)]


@st.composite
def held_copies(draw: st.DrawFn) -> Held:
    state = draw(st.sampled_from([HeldState.READY, HeldState.READY, HeldState.COMING, HeldState.FAILED]))
    return Held(
        state,
        num_bytes=draw(st.integers(1, 40)),
        is_booked=state is HeldState.READY or draw(st.booleans()),
        num_in_flight=draw(st.sampled_from([0, 0, 1])) if state is HeldState.READY else 0,
        last_used_s=draw(st.integers(0, 3)),
        is_pinned=draw(st.sampled_from([False, False, True])),
        priority=draw(st.sampled_from([100, 200])),
        is_wanted=draw(st.booleans()),
    )


@st.composite
def worker_slots(draw: st.DrawFn, max_accelerators: int = 1) -> list[WorkerSlot]:
    slots = []
    for index in range(draw(st.integers(0, 6))):
        holding = draw(st.dictionaries(st.sampled_from(MODELS), held_copies(), max_size=3))
        count = draw(st.integers(1, max_accelerators))
        room = draw(st.integers(1, 60))  # a budget of 0 is one that nobody knows
        used = sum(held.booked_bytes for held in holding.values())
        coming = sum(held.coming_bytes for held in holding.values())
        slots.append(
            WorkerSlot(
                f"w{index}",
                draw(st.sampled_from("pq")),
                node=draw(st.sampled_from(["", "n1", "n2"])),
                domains={"zone": draw(st.sampled_from("xyz"))},
                budget_bytes=used + coming + room,
                used_bytes=used,
                num_accelerators=count,
                holding=holding,
                near={name: Near.DISK for name in draw(st.sets(st.sampled_from(MODELS))) if name not in holding},
                failed=frozenset(draw(st.sets(st.sampled_from(MODELS), max_size=1)) - holding.keys()),
                is_leaving=draw(st.sampled_from([False, False, False, True])),
            )
        )
    return slots


@st.composite
def all_wants(draw: st.DrawFn, max_accelerators: int = 1) -> list[Want]:
    return [
        Want(
            model,
            draw(st.sampled_from([(), ("p",), ("p", "q")])),
            draw(st.integers(0, 4)),
            draw(st.integers(1, 60)),
            draw(st.integers(1, max_accelerators)),
            draw(st.sampled_from(["", "zone"])),
            draw(st.sampled_from([False, False, True])),
            barred=frozenset(draw(st.sets(st.sampled_from(["w0", "w1"]), max_size=1))),
        )
        for model in draw(st.sets(st.sampled_from(MODELS)))
    ]


def carried_out(placement: Placement, wants: Iterable[Want], slots: Iterable[WorkerSlot]) -> list[WorkerSlot]:
    """The workers once all new copies are ready and their victims are gone."""
    sizes = {want.model: want for want in wants}
    after = []
    for slot in slots:
        holding = dict(slot.holding)
        used = slot.used_bytes
        for model, copies in placement.copies.items():
            for copy in (each for each in copies if each.worker_id == slot.worker_id and each.is_new):
                for victim in copy.victims:
                    used -= holding.pop(victim).booked_bytes
                want = sizes[model]
                holding[model] = Held(num_bytes=want.num_bytes, num_accelerators=want.num_accelerators)
                used += want.num_bytes
        after.append(dataclasses.replace(slot, used_bytes=used, holding=holding))
    return after


@settings(deadline=None, max_examples=100)
@given(all_wants(), worker_slots())
def test_copies_stay_fit_and_evict_nobody_who_is_needed(wants: list[Want], slots: list[WorkerSlot]) -> None:
    placement = place(wants, slots)
    by_id = {slot.worker_id: slot for slot in slots}
    for want in wants:
        chosen = placement.workers(want.model)
        holders = {s.worker_id for s in slots if want.model in s.holding and is_eligible(s, want)}
        assert len(chosen) == len(set(chosen)) <= want.num_copies
        assert all(is_eligible(by_id[worker_id], want) for worker_id in chosen)
        assert set(chosen) <= holders or holders <= set(chosen), "a copy moved"
        missing = want.num_copies - len(chosen)
        assert missing == sum(each.num_missing for each in placement.unplaced if each.model == want.model)
        for copy in placement.copies[want.model]:
            assert copy.is_new == (copy.worker_id not in holders)
            for victim in copy.victims:
                held = by_id[copy.worker_id].holding[victim]
                assert held.is_idle
                assert copy.worker_id not in placement.workers(victim)
    for slot in carried_out(placement, wants, slots):
        assert slot.free_bytes >= 0, "loads under way included"


@settings(deadline=None, max_examples=100)
@given(all_wants(), worker_slots(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_does_not_matter_and_a_second_time_changes_nothing(
    wants: list[Want], slots: list[WorkerSlot], order: random.Random
) -> None:
    placement = place(wants, slots)
    turned_wants, turned_slots = list(wants), list(slots)
    order.shuffle(turned_wants)
    order.shuffle(turned_slots)
    assert place(turned_wants, turned_slots) == placement
    again = place(wants, carried_out(placement, wants, slots))
    assert {m: again.workers(m) for m in again.copies} == {m: placement.workers(m) for m in placement.copies}
    assert not any(copy.is_new for copies in again.copies.values() for copy in copies)
    assert {(u.model, u.num_missing) for u in again.unplaced} == {(u.model, u.num_missing) for u in placement.unplaced}


@settings(deadline=None, max_examples=80)
@given(all_wants(4), worker_slots(4))
def test_cut_copies_have_their_accelerators_and_fit_on_each(wants: list[Want], slots: list[WorkerSlot]) -> None:
    placement = place(wants, slots)
    by_id = {slot.worker_id: slot for slot in slots}
    touched = set()
    for want in wants:
        for copy in placement.copies[want.model]:
            assert by_id[copy.worker_id].num_accelerators >= want.num_accelerators
            touched |= {copy.worker_id} if copy.is_new else set()
    for slot in carried_out(placement, wants, slots):
        before = room_bytes(by_id[slot.worker_id], {}, (), slot.num_accelerators)
        if slot.worker_id in touched and before >= 0:
            assert slot.free_bytes >= 0
            assert room_bytes(slot, {}, (), slot.num_accelerators) >= 0, "an accelerator is overfull"


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 6), st.lists(st.sampled_from("xyz"), min_size=1, max_size=8), st.integers(1, 30))
def test_copies_spread_over_as_many_domains_as_there_are(num_copies: int, zones: list[str], num_bytes: int) -> None:
    slots = [WorkerSlot(f"w{i}", domains={"zone": zone}, budget_bytes=30) for i, zone in enumerate(zones)]
    found = place([Want("m", (), num_copies, num_bytes, spread_key="zone")], slots).workers("m")
    counts: dict[str, int] = {}
    for worker_id in found:
        zone = zones[int(worker_id[1:])]
        counts[zone] = counts.get(zone, 0) + 1
    assert len(found) == min(num_copies, len(zones))
    for zone in set(zones):
        # A zone has fewer than another only when all its workers have a copy.
        if counts.get(zone, 0) < zones.count(zone):
            assert counts.get(zone, 0) >= max(counts.values()) - 1


def first_fit(sizes: list[int], budget: int) -> int:
    """Workers used when each copy goes, in the order given, to the first one it fits on."""
    used: list[int] = []
    for size in sizes:
        for index, taken in enumerate(used):
            if taken + size <= budget:
                used[index] += size
                break
        else:
            used.append(size)
    return len(used)


def test_over_many_instances_no_more_workers_are_used_than_by_first_fit() -> None:
    draw = random.Random(7)
    ours = theirs = 0
    for _ in range(60):
        sizes = [draw.randint(5, 60) for _ in range(draw.randint(5, 30))]
        wants = [Want(f"m{index}", (), 1, size) for index, size in enumerate(sizes)]
        slots = [WorkerSlot(f"w{index:02}", budget_bytes=100) for index in range(len(sizes))]
        placement = place(wants, slots)
        assert not placement.unplaced
        num_used = len({worker for want in wants for worker in placement.workers(want.model)})
        num_first_fit = first_fit(sizes, 100)
        assert num_used <= num_first_fit + 1
        ours, theirs = ours + num_used, theirs + num_first_fit
    assert ours < theirs


@settings(deadline=None, max_examples=80)
@given(all_wants(2), worker_slots(2))
def test_a_cold_model_has_a_worker_wherever_memory_could_become_free(
    wants: list[Want], slots: list[WorkerSlot]
) -> None:
    for want in wants:
        choice = choose_load(want, slots)
        eligible = {slot.worker_id: slot for slot in slots if is_eligible(slot, want)}
        assert choice.reasons
        if not choice.worker_id:
            pinned = {w: sum(h.booked_bytes for h in s.holding.values() if h.is_pinned) for w, s in eligible.items()}
            assert all(
                s.num_accelerators > 1 or s.free_bytes + s.idle_bytes < want.num_bytes
                for w, s in eligible.items()
                if not pinned[w] and want.model not in s.holding
            )
            continue
        slot = eligible[choice.worker_id]
        assert all(slot.holding[victim].is_idle for victim in choice.victims)


@settings(deadline=None, max_examples=80)
@given(all_wants(), worker_slots(), st.integers(0, 3))
def test_moves_make_room_without_touching_what_is_busy_or_pinned(
    wants: list[Want], slots: list[WorkerSlot], max_moves: int
) -> None:
    found = defragment(wants, slots, max_moves)
    assert len(found.moves) <= max_moves
    if not found.moves:
        return
    by_id = {slot.worker_id: dict(slot.holding) for slot in slots}
    wanted = {want.model: want for want in wants}
    for move in found.moves:
        held = by_id[move.source].pop(move.model)
        assert held.is_idle
        target = next(slot for slot in slots if slot.worker_id == move.target)
        assert is_eligible(target, wanted[move.model])
        assert move.model not in by_id[move.target]
        by_id[move.target][move.model] = held
    after = [
        dataclasses.replace(
            slot,
            holding=by_id[slot.worker_id],
            used_bytes=slot.used_bytes
            + sum(m.num_bytes for m in found.moves if m.target == slot.worker_id)
            - sum(m.num_bytes for m in found.moves if m.source == slot.worker_id),
        )
        for slot in slots
    ]
    assert all(slot.free_bytes >= 0 for slot in after)
    before_count = len(place(wants, slots).workers(found.for_model))
    placed = place(wants, after)
    assert len(placed.workers(found.for_model)) > before_count
