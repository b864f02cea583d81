"""Which worker a cold model comes up on for requests: the placement that all parts share, over the route map. Pure.

Asked by the load desk where this router has the model loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from naru_proto.placement.choose import choose_load
from naru_proto.placement.facts import copy_bytes, slots_of, want_of
from naru_proto.placement.model import Held, HeldState, WorkerSlot
from naru_router.core.route_map import RouteMap


def choose_worker(
    route_map: RouteMap, model: str, able: Collection[str], coming: Mapping[str, str] | None = None
) -> str | None:
    """The worker that is to load a model; None: none can.

    Args:
        route_map: as last read.
        model: the name that workers hold it under.
        able: workers that may be asked.
        coming: models that have been asked for elsewhere just now, and where: their leases may not show them yet.
    """
    record = route_map.models.get(model)
    if record is None:
        return None
    slots = slots_of(
        route_map.workers,
        known=route_map.known,
        models=route_map.models,
        footprints=route_map.footprints,
        nodes=route_map.nodes,
    )
    barred = route_map.workers.keys() - set(able)
    want = want_of(model, record, 1, route_map.footprints.get(model), barred)
    told = [_with_coming(slot, model, route_map, coming or {}) for slot in slots]
    return choose_load(want, told).worker_id or None


def _with_coming(slot: WorkerSlot, model: str, route_map: RouteMap, coming: Mapping[str, str]) -> WorkerSlot:
    more = {
        name: Held(HeldState.COMING, copy_bytes(route_map.footprints.get(name)), is_booked=False)
        for name, worker_id in coming.items()
        if worker_id == slot.worker_id and name != model and name not in slot.holding
    }
    return dataclasses.replace(slot, holding={**slot.holding, **more}) if more else slot
