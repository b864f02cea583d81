"""Loads and unloads that bring workers to a placement, with the reason of each. Pure.

Shared by the plan of one machine and by that of a cluster, which say where models belong and in which generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from naru_operator.core.desired import DesiredModel, Tier
from naru_operator.core.model_plan import ABSENT, AT_REST, KNOWN, UP, Applied, LoadModel, ObservedModel, UnloadModel

Observed = Mapping[str, Mapping[str, ObservedModel]]
"""Worker to its models, for all workers that take commands."""
_DOWN = ("cold", "host", *AT_REST)
"""States from which a load asked for again brings a model up."""


def unload_steps(
    workers: Observed,
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    drain_timeout_s: Callable[[str], float],
    reasons: list[str],
    *,
    kept: Collection[tuple[str, str]] = (),
    known: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[UnloadModel, ...]:
    """What is held or known where it does not belong goes, but for the (worker, model) pairs in `kept`.

    ``known``: workers that may have a model beside its placement; what they hold of it is the routers' keeper's. A line
    for each is appended to `reasons`.
    """
    belongs = {name: {*chosen, *(known or {}).get(name, ())} for name, chosen in placement.items()}
    unloads = []
    for worker_id, models in workers.items():
        for name, held in sorted(models.items()):
            if worker_id in belongs.get(name, ()) or held.state in ABSENT or (worker_id, name) in kept:
                continue
            planned = applied.get(name, (None, 0))[1]
            why = "it belongs on other workers" if name in placement else "no manifest names it"
            unloads.append(UnloadModel(worker_id, name, max(planned, held.generation), drain_timeout_s(worker_id)))
            reasons.append(f"unload {name!r} from {worker_id!r}: {why}")
    return tuple(unloads)


def load_steps(
    workers: Observed,
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    reasons: list[str],
    *,
    raised: Collection[tuple[str, str]] = (),
    known: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[LoadModel, ...]:
    """What is neither held nor known where it belongs, in its generation, is loaded or made known.

    The (worker, model) pairs in `raised` are brought up at once, known ones and those on demand too. The workers in
    `known` are told of a model and need not load it. A line for each load is appended to `reasons`.
    """
    loads: list[LoadModel] = []
    for worker_id, name, is_placed in _due(workers, applied, placement, raised, known or {}):
        model, generation = applied[name]
        assert model is not None, "only models that are wanted are due"
        held, is_raised = workers[worker_id].get(name), (worker_id, name) in raised
        tier = _tier(model, held, is_raised=is_raised, is_placed=is_placed)
        is_spare = not (is_placed or is_raised) and bool(placement[name])
        loads.append(_load(worker_id, model, generation, tier, is_spare=is_spare))
        step = "make known" if tier is Tier.COLD else "load"
        why = "its copy elsewhere is to go" if is_raised else _why_load(tier, held, generation)
        reasons.append(f"{step} {name!r} in generation {generation} on {worker_id!r}: {why}")
    return tuple(loads)


def _due(
    workers: Observed,
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    raised: Collection[tuple[str, str]],
    known: Mapping[str, tuple[str, ...]],
) -> Iterable[tuple[str, str, bool]]:
    """(worker, model, whether it is placed there) of the loads to begin, by worker in the order of `workers`."""
    due: dict[str, list[tuple[str, bool]]] = {worker_id: [] for worker_id in workers}
    for name, chosen in placement.items():
        model, generation = applied.get(name, (None, 0))
        if model is None:
            continue
        places = dict.fromkeys(known.get(name, ()), False) | dict.fromkeys(chosen, True)
        for worker_id, is_placed in places.items():
            models = workers.get(worker_id)
            if models is None:
                continue
            is_wanted_up = is_placed and not model.is_on_demand
            is_raised = (worker_id, name) in raised
            if _is_due(models.get(name), generation, is_raised=is_raised, is_wanted_up=is_wanted_up):
                due[worker_id].append((name, is_placed))
    return ((worker_id, name, is_placed) for worker_id, found in due.items() for name, is_placed in sorted(found))


def _tier(model: DesiredModel, held: ObservedModel | None, *, is_raised: bool, is_placed: bool) -> Tier:
    if is_raised:
        return Tier.ACTIVE
    if is_placed:
        return model.residency.tier
    # What the keeper brought up stays up in a new generation.
    is_up = held is not None and held.state in UP and not model.is_on_demand
    return Tier.ACTIVE if is_up else Tier.COLD


def _is_due(held: ObservedModel | None, generation: int, *, is_raised: bool, is_wanted_up: bool) -> bool:
    if held is None:
        return True
    if held.state == "draining":
        return False  # its lease says when it is gone; then it is planned again
    if held.state == "cold" or held.generation < generation:
        return True
    # Evicted, loaded, on its way, or failed: that waits for a request, the worker's own retry, or another manifest.
    return held.state in _DOWN if is_raised else is_wanted_up and held.state == KNOWN


def _load(worker_id: str, model: DesiredModel, generation: int, tier: Tier, *, is_spare: bool) -> LoadModel:
    residency = dataclasses.replace(model.residency, tier=tier)
    return LoadModel(
        worker_id,
        model.name,
        model.uri,
        model.revision,
        generation,
        model.limits,
        residency,
        model.credentials,
        is_spare,
    )


def _why_load(tier: Tier, held: ObservedModel | None, generation: int) -> str:
    if held is None:
        return "it does not know it" if tier is Tier.COLD else "it does not hold it"
    if held.generation >= generation:
        return "a copy belongs there"
    return f"it {'knows' if held.state in AT_REST else 'holds'} generation {held.generation}"
