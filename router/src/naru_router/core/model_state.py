"""What /v1/models says of a model beside its name: where it stands, as its workers tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from naru_proto.registry import ModelRecord, ResidentRecord
from naru_router.core.route_map import READY, RouteMap

_NEAREST = ("loading", "fetching", "draining", "host", "failed", "cold")
"""States in the order in which one of several copies is told of; ready goes before all."""
MAX_REASON_CHARS = 500


def model_card(name: str, record: ModelRecord, route_map: RouteMap) -> dict[str, object]:
    """The object of one name, which may be an alias; OpenAI's fields first."""
    model = record.target or record.name
    info = route_map.info(model)
    num_ready = len(route_map.ready_workers(model))
    return {
        "id": name,
        "object": "model",
        "created": record.created_s,
        "owned_by": "naru",
        "root": record.name,
        "parent": None,
        "aliases": list(record.aliases),
        "max_model_len": None if info is None else info.max_model_len,
        "tasks": None if info is None else list(info.tasks),
        "embedding_dim": info.embedding_dim or None if info is not None else None,
        "ready_workers": num_ready,
        "copies": {"min": record.min_replicas, "max": record.max_replicas or None, "ready": num_ready},
        **_state(model, num_ready, route_map),
    }


def _state(model: str, num_ready: int, route_map: RouteMap) -> dict[str, object]:
    """`state` is ready, one of _NEAREST as its nearest copy is, or cold; what is not known of it is null."""
    found: dict[str, object] = {"state": READY, "eta_s": None, "progress": None, "reason": None}
    if num_ready:
        return found
    copies = route_map.copies(model)
    copy = min(copies, key=_distance, default=None)
    if copy is None:
        return {**found, "state": "cold"}
    found["state"] = "draining" if copy.state == READY else copy.state  # ready on a worker that takes no more
    if copy.state in ("loading", "fetching"):
        found["eta_s"] = round(route_map.eta_s(model), 3) or None
        found["progress"] = _progress(copies)
    elif copy.state == "failed":
        found["reason"] = "; ".join(route_map.failures(model))[:MAX_REASON_CHARS]
    return found


def _distance(copy: ResidentRecord) -> int:
    state = "draining" if copy.state == READY else copy.state
    return _NEAREST.index(state) if state in _NEAREST else len(_NEAREST)


def _progress(copies: Sequence[ResidentRecord]) -> float | None:
    """In [0, 1], of the copy that is farthest."""
    known = [min(1.0, it.bytes_done / it.bytes_total) for it in copies if it.bytes_total > 0 and it.state != "host"]
    return round(max(known), 4) if known else None
