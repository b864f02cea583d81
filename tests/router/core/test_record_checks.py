"""Whatever stands in the route map is a record that can be what it says, or is left out; nothing else happens."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InternalError
from naru_proto.registry import FootprintRecord, KnownRecord, ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.record_checks import has_digest, is_footprint, is_info, is_known, is_model, is_worker
from naru_router.core.route_map import RouteMap

RESIDENT = ResidentRecord("ready", 1, "d", eta_s=0.5)
WORKER = WorkerRecord("w", "[::1]:9090", "e", {"m": RESIDENT}, domains={"zone": "a"})
MODEL = ModelRecord(
    "m", "file:///m", 1, aliases=("a",), split=(("m", 1),), fallbacks=("f",), pools=("p",), allow=("t",)
)
INFO = ModelInfoRecord("llama", 2048, 49152, "{{ messages }}", "<s>", "</s>")
KNOWN, FOOTPRINT = KnownRecord("host", 5), FootprintRecord(1, 2, 3, 0.5, 1.5)
SOUND: list[Any] = [MODEL, WORKER, INFO, KNOWN, FOOTPRINT]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**15, 10**400)
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "m", "w", "ready", "127.0.0.1:1"])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


def is_sane(record: Any) -> bool:
    match record:
        case ModelRecord():
            return is_model("m", record)
        case WorkerRecord():
            return is_worker("w", record)
        case ModelInfoRecord():
            return is_info(record)
        case KnownRecord():
            return is_known("m", record)
        case FootprintRecord():
            return is_footprint("m", record)
    raise AssertionError(record)


def taken(kind: Any, text: str) -> Any:
    """The record that a reader takes from a text; None: it is left out."""
    try:
        record = kind.from_json(text)
    except InternalError:
        return None
    return record if is_sane(record) else None


@pytest.mark.parametrize("record", SOUND, ids=lambda record: type(record).__name__)
def test_what_the_parts_write_is_taken(record: Any) -> None:
    assert taken(type(record), record.to_json()) == record


@given(st.sampled_from([type(record) for record in SOUND]), anything)
def test_any_json_is_a_record_or_left_out(kind: Any, value: Any) -> None:
    taken(kind, json.dumps(value))


@given(st.sampled_from(SOUND), st.data())
def test_a_record_with_any_field_replaced_can_be_used_or_is_left_out(record: Any, data: st.DataObject) -> None:
    fields = json.loads(record.to_json())
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(anything)
    found = taken(type(record), json.dumps(fields))
    if found is not None:
        use(found)


@given(st.sampled_from([field.name for field in dataclasses.fields(ResidentRecord)]), anything)
def test_a_copy_with_any_field_replaced_can_be_used_or_its_lease_is_left_out(name: str, value: Any) -> None:
    fields = json.loads(WORKER.to_json())
    fields["models"]["m"][name] = value
    found = taken(WorkerRecord, json.dumps(fields))
    if found is not None:
        use(found)


def use(record: Any) -> None:
    """What the router does with records of all kinds: shows, sends and hashes them, and asks the map."""
    orjson.dumps(dataclasses.asdict(record), option=orjson.OPT_NON_STR_KEYS)
    record.to_json().encode()
    if isinstance(record, ModelRecord):
        route_map = RouteMap({"m": record}, {"w": WORKER})
        caller = Caller(record.allow[0]) if record.allow else ANYONE
        for name in route_map.names(caller):
            route_map.resolve(name, caller) if not record.target else route_map.entry(name, caller)
        route_map.has_moved("m", "other")
    if isinstance(record, WorkerRecord):
        route_map = RouteMap({"m": MODEL}, {"w": record})
        for model in record.models:
            route_map.ready_workers(model), route_map.failures(model), route_map.eta_s(model), route_map.info(model)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ModelRecord, {"aliases": "abc"}),
        (ModelRecord, {"fallbacks": {"a": 1}}),
        (ModelRecord, {"split": [["a"]]}),
        (ModelRecord, {"split": [["a", 1.5]]}),
        (ModelRecord, {"split": ["ab"]}),
        (ModelRecord, {"aliases": ["\ud800"]}),
        (ModelRecord, {"created_s": 10**30}),
        (ModelRecord, {"load_factor": 0.5}),
        (ModelRecord, {"max_wait_s": float("nan")}),
        (WorkerRecord, {"address": "nowhere"}),
        (WorkerRecord, {"address": "host:0"}),
        (WorkerRecord, {"address": ":9090"}),
        (WorkerRecord, {"num_running": -1}),
        (WorkerRecord, {"models": []}),
        (WorkerRecord, {"models": {"m": None}}),
        (WorkerRecord, {"models": {"m": {"state": "ready", "eta_s": 10**400}}}),
        (WorkerRecord, {"models": {"m": {"state": "ready", "num_bytes": True}}}),
        (ModelInfoRecord, {"max_model_len": 0}),
        (ModelInfoRecord, {"max_model_len": 2**31}),
        (ModelInfoRecord, {"chat_template": None}),
        (FootprintRecord, {"weight_bytes": -5}),
    ],
)
def test_what_cannot_be_is_left_out(kind: Any, fields: dict[str, Any]) -> None:
    sound = next(record for record in SOUND if isinstance(record, kind))
    assert taken(kind, json.dumps({**json.loads(sound.to_json()), **fields})) is None


def test_a_record_under_another_name_is_left_out() -> None:
    assert not is_model("other", MODEL) and not is_worker("other", WORKER) and not is_worker("", WORKER)


def test_fields_of_a_newer_version_are_no_damage() -> None:
    text = json.dumps({**json.loads(INFO.to_json()), "newer": [1]})
    assert taken(ModelInfoRecord, text) == INFO


@given(st.binary())
def test_facts_are_those_of_their_digest(data: bytes) -> None:
    assert has_digest(INFO.to_json().encode(), INFO.digest())
    assert not has_digest(INFO.to_json().encode() + data, INFO.digest()) or not data


def test_json_that_is_too_deep_is_left_out() -> None:
    assert taken(ModelRecord, '{"name": ' + "[" * 100_000) is None
