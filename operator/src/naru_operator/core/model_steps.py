"""Loads and unloads that bring workers to a placement, with the reason of each. Pure.

Shared by the plan of one machine and by that of a cluster, which say where models belong and in which generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping

from naru_operator.core.desired import DesiredModel, Tier
from naru_operator.core.model_plan import ABSENT, KNOWN, Applied, LoadModel, ObservedModel, UnloadModel

Observed = Mapping[str, Mapping[str, ObservedModel]]
"""Worker to its models, for all workers that take commands."""
_DOWN = ("cold", "host", KNOWN)
"""States from which a load asked for again brings a model up."""


def unload_steps(
    workers: Observed,
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    drain_timeout_s: Callable[[str], float],
    reasons: list[str],
    *,
    kept: Collection[tuple[str, str]] = (),
) -> tuple[UnloadModel, ...]:
    """What is held or known where it does not belong goes, but for the (worker, model) pairs in `kept`.

    A line for each is appended to `reasons`.
    """
    unloads = []
    for worker_id, models in workers.items():
        for name, held in sorted(models.items()):
            is_placed = worker_id in placement.get(name, ())
            if is_placed or held.state in ABSENT or (worker_id, name) in kept:
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
) -> tuple[LoadModel, ...]:
    """What is neither held nor known where it belongs, in its generation, is loaded or made known.

    The (worker, model) pairs in `raised` are brought up at once, known ones and those on demand too. A line for each
    load is appended to `reasons`.
    """
    loads: list[LoadModel] = []
    for worker_id, name in _due(workers, applied, placement, raised):
        model, generation = applied[name]
        assert model is not None, "only models that are wanted are due"
        held, is_raised = workers[worker_id].get(name), (worker_id, name) in raised
        loads.append(_load(worker_id, model, generation, is_raised=is_raised))
        step = "make known" if model.is_on_demand and not is_raised else "load"
        why = "its copy elsewhere is to go" if is_raised else _why_load(model, held)
        reasons.append(f"{step} {name!r} in generation {generation} on {worker_id!r}: {why}")
    return tuple(loads)


def _due(
    workers: Observed,
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    raised: Collection[tuple[str, str]],
) -> Iterable[tuple[str, str]]:
    """(worker, model) of the loads to begin, by worker in the order of `workers`, then by model."""
    due: dict[str, list[str]] = {worker_id: [] for worker_id in workers}
    for name, chosen in placement.items():
        model, generation = applied.get(name, (None, 0))
        if model is None:
            continue
        for worker_id in chosen:
            models = workers.get(worker_id)
            if models is not None and _is_due(models.get(name), generation, is_raised=(worker_id, name) in raised):
                due[worker_id].append(name)
    return ((worker_id, name) for worker_id, names in due.items() for name in sorted(names))


def _is_due(held: ObservedModel | None, generation: int, *, is_raised: bool) -> bool:
    if held is None:
        return True
    if held.state == "draining":
        return False  # its lease says when it is gone; then it is planned again
    # Known, loaded, on its way, or failed: that waits for a request, the worker's own retry, or another manifest.
    is_there = held.state != "cold" and held.generation >= generation
    return not is_there or (is_raised and held.state in _DOWN)


def _load(worker_id: str, model: DesiredModel, generation: int, *, is_raised: bool) -> LoadModel:
    residency = dataclasses.replace(model.residency, tier=Tier.ACTIVE) if is_raised else model.residency
    return LoadModel(
        worker_id, model.name, model.uri, model.revision, generation, model.limits, residency, model.credentials
    )


def _why_load(model: DesiredModel, held: ObservedModel | None) -> str:
    if held is None:
        return "it does not know it" if model.is_on_demand else "it does not hold it"
    return f"it {'knows' if held.state == KNOWN else 'holds'} generation {held.generation}"
