"""What the keeper is shown of a route map and of the workers' frames."""

from __future__ import annotations

from naru_proto.registry import FootprintRecord, KnownRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.adapters.keeper.sight import Sight
from naru_router.adapters.news import ModelNews
from naru_router.core.keeper.model import CopyLoad
from naru_router.core.route_map import RouteMap

MODELS = {
    "a": ModelRecord("a", "hf://o/a", 1, target="a@2"),
    "a@1": ModelRecord("a@1", "hf://o/a", 1, is_revision=True),
    "a@2": ModelRecord("a@2", "hf://o/a", 2, is_revision=True),
    "gone": ModelRecord("gone", "hf://o/g", 1, target="gone@1"),
}
HELD = {"a@2": ResidentRecord("ready", 2, num_in_flight=1), "a@1": ResidentRecord("host", 1)}
WORKER = WorkerRecord("w0", "h:1", "e", HELD, node="n0", budget_bytes=100)
NEWS = {
    ("w0", "a@2"): ModelNews(num_running=2, num_waiting=3, num_others=4, waiting_tokens=500, prefill_tokens_per_s=250.0)
}


def test_models_that_serve_are_shown_with_what_workers_told_and_where_they_stand() -> None:
    route_map = RouteMap(
        MODELS,
        {"w0": WORKER},
        known={"w0": {"a@1": KnownRecord("disk")}},
        footprints={"a@2": FootprintRecord(70, 10)},
        nodes={"n0": {"zone": "z1"}},
    )
    view = Sight(lambda: route_map, lambda worker_id, model: NEWS.get((worker_id, model))).view()
    assert {name: record.name for name, record in view.models.items()} == {"a@2": "a"}
    (slot,) = view.slots
    assert slot.domain("zone") == "z1" and set(slot.holding) == {"a@2"} and slot.holding["a@2"].num_bytes == 80
    assert view.loads == {("w0", "a@2"): CopyLoad(5, 2.0)}
    assert view.num_in_flight("w0", "a@2") == 5


def test_without_a_measured_speed_no_queue_is_made_up() -> None:
    route_map = RouteMap(MODELS, {"w0": WORKER})
    view = Sight(lambda: route_map, lambda worker_id, model: ModelNews(num_waiting=9, waiting_tokens=900)).view()
    assert view.loads == {("w0", "a@2"): CopyLoad(9, 0.0)}


def test_a_new_map_is_seen_at_once_and_an_old_one_is_not_read_again() -> None:
    maps = [RouteMap(MODELS, {"w0": WORKER})]
    sight = Sight(lambda: maps[-1], lambda worker_id, model: None)
    assert sight.view().slots is sight.view().slots and sight.view().loads == {}
    maps.append(RouteMap(MODELS, {}))
    assert sight.view().slots == ()
