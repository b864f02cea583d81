"""Which commands are refused: older than what was seen, or saying what cannot be. Pure; refusing changes nothing."""

from __future__ import annotations

import math
from collections.abc import Hashable

from naru_proto.errors import InvalidRequest, ModelNotFound, StaleCommand, Unavailable
from naru_worker.core.hub.events import Ask, Move, Release
from naru_worker.core.hub.model import ModelEntry, Residency, Tier
from naru_worker.core.hub.records import Record


def check_ask(entry: ModelEntry | None, generation_spec: Hashable, ask: Ask) -> None:
    """`generation_spec`: what the newest generation stands for, also after the model was forgotten; None: nothing yet.

    Raises:
        StaleCommand: a newer generation or fencing token was seen.
        InvalidRequest: the generation stands for something else already, or a field is out of range.
    """
    if ask.spec is None:
        raise InvalidRequest(f"model {ask.model!r} is asked for without a spec; say what to load", param="uri")
    _check_numbers(ask.model, ask.generation, ask.fencing_token)
    _check_residency(ask.model, ask.residency)
    _refuse_stale(entry, ask.model, ask.generation, ask.fencing_token)
    if (
        entry is not None
        and ask.generation == entry.generation
        and generation_spec is not None
        and generation_spec != ask.spec
    ):
        raise InvalidRequest(
            f"generation {ask.generation} of model {ask.model!r} stands for other files or options already "
            f"({generation_spec!r}, not {ask.spec!r}); raise the generation to replace it",
            param="generation",
        )


def check_release(entry: ModelEntry | None, release: Release) -> None:
    """Checks a release against what was seen.

    Raises:
        StaleCommand: a newer generation or fencing token was seen.
        InvalidRequest: a field is out of range.
    """
    _check_numbers(release.model, release.generation, release.fencing_token)
    _check_drain_timeout(release.model, release.drain_timeout_s)
    if release.tier is Tier.ACTIVE:
        raise InvalidRequest(
            f"the release of model {release.model!r} names tier ACTIVE; it may go to HOST or COLD, or be forgotten",
            param="tier",
        )
    _refuse_stale(entry, release.model, release.generation, release.fencing_token)


def check_move(record: Record | None, move: Move, now_s: float) -> Record:
    """The record of a model that may be moved.

    Raises:
        ModelNotFound: nothing is known to load under this name.
        StaleCommand: a newer fencing token was seen.
        InvalidRequest: a field is out of range.
        Unavailable: it has requests and may be moved only without, is pinned, or its loads fail.
    """
    if record is None or not record.entry.is_wanted:
        raise ModelNotFound(f"model {move.model!r} is not known to this worker: tell it of the model first")
    entry = record.entry
    _check_numbers(move.model, 0, move.fencing_token)
    _check_drain_timeout(move.model, move.drain_timeout_s)
    _refuse_stale(entry, move.model, entry.generation, move.fencing_token)
    num_requests = entry.num_in_flight + entry.num_held
    if move.tier < record.near:
        if entry.residency.pinned and entry.tier is Tier.ACTIVE:
            raise Unavailable(f"model {move.model!r} is pinned here by its orders; only another order takes it down")
        if move.only_if_idle and num_requests:
            raise Unavailable(
                f"model {move.model!r} has {num_requests} requests in flight and was to be moved to tier "
                f"{move.tier.name} only without; try again when they have ended"
            )
    elif record.is_failed and not record.is_without_room and now_s < entry.retry_at_s and move.tier > Tier.COLD:
        raise Unavailable(
            f"model {move.model!r} failed here and is tried again in {entry.retry_at_s - now_s:.3g} s at the earliest: "
            f"{entry.error}"
        )
    return record


def _check_drain_timeout(model: str, drain_timeout_s: float) -> None:
    if not drain_timeout_s >= 0.0:
        raise InvalidRequest(
            f"drain_timeout_s of model {model!r} is {drain_timeout_s!r}; it must be at least 0",
            param="drain_timeout_s",
        )


def _check_numbers(model: str, generation: int, fencing_token: int) -> None:
    for name, value in (("generation", generation), ("fencing_token", fencing_token)):
        if value < 0:
            raise InvalidRequest(f"{name} of model {model!r} is {value!r}; it must be at least 0", param=name)


def _check_residency(model: str, residency: Residency) -> None:
    if not 1 <= residency.priority <= 1000:
        raise InvalidRequest(
            f"priority of model {model!r} is {residency.priority!r}; it must be in [1, 1000]", param="priority"
        )
    for name in ("min_residency_s", "idle_ttl_s"):
        value: float = getattr(residency, name)
        if not (value >= 0.0 and math.isfinite(value)):
            raise InvalidRequest(
                f"{name} of model {model!r} is {value!r}; it must be at least 0 and finite", param=name
            )


def _refuse_stale(entry: ModelEntry | None, model: str, generation: int, fencing_token: int) -> None:
    if entry is None:
        return
    if 0 < fencing_token < entry.fencing_token:
        raise StaleCommand(
            f"fencing token {fencing_token} for model {model!r} is older than {entry.fencing_token}, which this worker "
            "has seen; take the lease again",
            param="fencing_token",
            newest_generation=entry.generation,
        )
    if generation < entry.generation:
        raise StaleCommand(
            f"generation {generation} of model {model!r} is older than {entry.generation}, which this worker has seen; "
            "ask with the newest one",
            newest_generation=entry.generation,
        )
