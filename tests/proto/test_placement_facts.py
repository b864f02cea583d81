"""From leases, the registry, footprints and what is near to what placement asks for."""

from __future__ import annotations

import pytest

from naru_proto.placement import HeldState, Near, copy_bytes, place, read_labels, served, slots_of, want_of
from naru_proto.registry import FootprintRecord, KnownRecord, ModelRecord, ResidentRecord, WorkerRecord

FOOTPRINT = FootprintRecord(weight_bytes=70, kv_min_bytes=20, private_bytes=10)


def worker(worker_id: str, models: dict[str, ResidentRecord], **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id, "x:1", "e", models, pool="p", budget_bytes=1000, **fields)  # type: ignore[arg-type]


def record(name: str, **fields: object) -> ModelRecord:
    return ModelRecord(name, "pypi://x", 1, **fields)  # type: ignore[arg-type]


def test_an_entry_stands_for_what_workers_hold_under_its_targets_name() -> None:
    entry, revision = record("m", target="m@1", policy="pinned"), record("m@1", is_revision=True)
    assert served({"m": entry, "m@1": revision, "n": record("n")}) == {"m@1": entry, "n": record("n")}


def test_a_want_has_the_models_bytes_and_wishes() -> None:
    entry = record("m", pools=("p",), policy="pinned", priority=200, num_accelerators=2, spread_key="zone")
    found = want_of("m@1", entry, 3, FOOTPRINT, barred=["w"])
    assert (found.model, found.pools, found.num_copies, found.num_bytes) == ("m@1", ("p",), 3, 100)
    assert (found.num_accelerators, found.spread_key, found.is_pinned, found.priority) == (2, "zone", True, 200)
    assert found.barred == {"w"}
    assert want_of("m", record("m"), 1).num_bytes == copy_bytes(None) == 0


def test_a_slot_shows_what_a_lease_holds_and_what_is_near() -> None:
    models = {
        "ready": ResidentRecord("ready", weight_bytes=70, kv_bytes=50, num_in_flight=2, last_used_s=9),
        "loading": ResidentRecord("loading"),
        "fetching": ResidentRecord("fetching"),
        "host": ResidentRecord("host"),
        "failed": ResidentRecord("failed"),
        "draining": ResidentRecord("draining"),
    }
    lease = worker("w", models, used_bytes=230, node="n", domains={"rack": "7"}, num_accelerators=2)
    (slot,) = slots_of(
        {"w": lease},
        known={"w": {"cold": KnownRecord("disk", 5), "odd": KnownRecord("moon"), "ready": KnownRecord("disk")}},
        models={"ready": record("ready", policy="pinned", priority=300)},
        footprints=dict.fromkeys(models, FOOTPRINT),
        nodes={"n": {"zone": "a"}, "other": {"zone": "b"}},
    )
    assert {name: (held.state, held.num_bytes, held.is_booked) for name, held in slot.holding.items()} == {
        "ready": (HeldState.READY, 130, True),
        "loading": (HeldState.COMING, 100, True),
        "fetching": (HeldState.COMING, 100, False),
    }
    ready = slot.holding["ready"]
    assert (ready.num_in_flight, ready.last_used_s, ready.is_pinned, ready.priority) == (2, 9, True, 300)
    assert slot.near == {"cold": Near.DISK, "host": Near.HOST}
    assert slot.failed == {"failed"}
    assert slot.free_bytes == 1000 - 230 - 100
    assert (slot.domain("zone"), slot.domain("rack"), slot.domain("")) == ("a", "7", "n")


@pytest.mark.parametrize("state", [{"leaving": True}, {"draining": True}])
def test_a_worker_that_goes_gets_nothing_and_its_copies_are_wanted_elsewhere(state: dict[str, bool]) -> None:
    up = {"m": ResidentRecord("ready", weight_bytes=70)}
    slots = slots_of({"a": worker("a", up, **state), "b": worker("b", {})}, models={"m": record("m")})
    assert place([want_of("m", record("m"), 1)], slots).workers("m") == ("b",)


def test_copies_that_there_must_be_are_the_busiest_of_as_many_as_the_registry_says() -> None:
    def up(num_in_flight: int) -> dict[str, ResidentRecord]:
        return {"m": ResidentRecord("ready", num_in_flight=num_in_flight), "d": ResidentRecord("ready")}

    models = {"m": record("m", min_replicas=2), "d": record("d", on_demand=True)}
    slots = slots_of({name: worker(name, up(count)) for name, count in (("a", 0), ("b", 3), ("c", 1))}, models=models)
    assert [slot.holding["m"].is_wanted for slot in slots] == [False, True, True]
    assert not any(slot.holding["d"].is_wanted for slot in slots)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('{"zone":"a"}', {"zone": "a"}),
        (b"{}", {}),
        ("[]", None),
        ('{"zone":1}', None),
        ("{", None),
        ("[" * 100_000, None),
    ],
)
def test_labels_are_texts_or_nothing(text: str | bytes, labels: dict[str, str] | None) -> None:
    assert read_labels(text) == labels
