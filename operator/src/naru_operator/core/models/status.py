"""The status of a ModelDeployment, from what was decided and what the workers say. Pure and quiet.

Equal facts give an equal status; progress is cut to whole percents, so that the controller may hold back what is
progress alone (see `changes`).
"""

from __future__ import annotations

from typing import Any, cast

from naru_operator.core.models.conditions import Summary, clean, conditions
from naru_operator.core.models.facts import CopyFact, ModelFacts
from naru_operator.core.models.model import Verdict
from naru_operator.core.pools.member_names import pool_label
from naru_proto import names
from naru_proto.crd.metadata import Condition, ObjectError
from naru_proto.crd.model_status import (
    MAX_RESIDENTS,
    EvictionStatus,
    LoadStatus,
    ModelDeploymentStatus,
    ModelPhase,
    ReplicasStatus,
    Resident,
    ResidentState,
)
from naru_proto.crd.units import timestamp_of

LOAD_FAILED = "model_load_failed"
_MAX_ERROR_LENGTH = 4096
_MAX_SELECTOR_LENGTH = 1024
_MAX_UNIX_S = 253_402_300_799
_ETA_STEP_S = 5
"""Step of a load's remaining time above `_ETA_EXACT_S`: what moves each moment is no news."""
_ETA_EXACT_S = 10
_IN_MEMORY = ("loading", "ready", "active")


def model_status(
    verdict: Verdict,
    facts: ModelFacts,
    previous: ModelDeploymentStatus,
    *,
    generation: int | None,
    now_s: int,
) -> ModelDeploymentStatus:
    """What to write of one object. ``previous`` is what was written last; ``generation`` its spec's."""
    summary = Summary(verdict, facts)
    told = conditions(summary, previous, generation=generation, now_s=now_s)
    is_same_revision = previous.current_revision == (verdict.current or None)
    resolved = facts.resolved_revision or (previous.resolved_revision if is_same_revision else None)
    # Every value below was made to fit; validating it again for each of thousands of objects would cost a second.
    return ModelDeploymentStatus.model_construct(
        observed_generation=generation,
        phase=_phase(summary, told),
        conditions=told,
        replicas=ReplicasStatus.model_construct(
            desired=verdict.num_desired,
            resident=sum(copy.resident.state in _IN_MEMORY for copy in facts.copies),
            ready=summary.num_ready,
        ),
        selector=_selector(verdict.pools) or previous.selector,
        resolved_revision=resolved[:253] if resolved else None,
        current_revision=verdict.current or None,
        update_revision=verdict.update or None,
        weight_bytes=_weight_bytes(summary, previous),
        residents=_residents(summary),
        load=_load(summary, previous, now_s),
        last_used=_last_used(summary, previous),
        last_eviction=_last_eviction(facts, previous),
        last_error=_last_error(summary, previous, now_s),
    )


def _phase(summary: Summary, told: tuple[Condition, ...]) -> ModelPhase:
    if summary.num_ready:
        is_degraded = any(each.type == "Degraded" and each.status == "True" for each in told)
        return "Degraded" if is_degraded else "Ready"
    if not summary.verdict.is_accepted:
        return "Failed"
    return _phase_on_the_way(summary)


def _phase_on_the_way(summary: Summary) -> ModelPhase:
    verdict = summary.verdict
    states = summary.states(verdict.update) | summary.states(verdict.current)
    is_at_rest = bool(verdict.is_on_demand or summary.facts.num_known or "host" in states)
    steps: tuple[tuple[ModelPhase, bool], ...] = (
        ("Loading", "loading" in states),
        ("Fetching", "fetching" in states),
        ("Failed", "failed" in states or bool(summary.facts.failed)),
        ("Draining", bool(states & {"ready", "active", "draining"})),
        ("Pending", not verdict.placed_on),
        ("Unloaded", is_at_rest),
    )
    return next((phase for phase, is_it in steps if is_it), "Placing")


def _selector(pools: tuple[str, ...]) -> str | None:
    if not pools:
        return None
    text = f"{names.LABEL_POOL} in ({','.join(pool_label(pool) for pool in pools)})"
    return text if len(text) <= _MAX_SELECTOR_LENGTH else None


def _weight_bytes(summary: Summary, previous: ModelDeploymentStatus) -> int | None:
    verdict = summary.verdict
    for digest in (summary.serving, verdict.update):
        known = max((copy.resident.weight_bytes for copy in summary.copies_of(digest)), default=0)
        if known > 0:
            return known
    return previous.weight_bytes if previous.update_revision == (verdict.update or None) else None


def _residents(summary: Summary) -> tuple[Resident, ...]:
    """One for each worker: of two revisions on one, the one that answers requests, else the one on its way."""
    chosen: dict[str, CopyFact] = {}
    for copy in summary.facts.copies:
        other = chosen.get(copy.worker_id)
        if other is None or (not other.takes_requests and copy.digest == summary.verdict.update):
            chosen[copy.worker_id] = copy
    return tuple(_resident(copy) for _, copy in sorted(chosen.items())[:MAX_RESIDENTS])


def _resident(copy: CopyFact) -> Resident:
    record = copy.resident
    return Resident.model_construct(
        worker=copy.worker_id[:253],
        pool=copy.pool[:253],
        state=cast(ResidentState, record.state.capitalize()) if record.state.capitalize() in _STATES else "Cold",
        weight_bytes=max(0, record.weight_bytes),
        kv_bytes=max(0, record.kv_bytes),
        in_flight=max(0, record.num_in_flight),
        since=_moment(record.since_s),
        last_used=_moment(record.last_used_s),
        generation=None,
    )


_STATES = frozenset({"Cold", "Fetching", "Host", "Loading", "Ready", "Active", "Draining", "Failed"})


def _load(summary: Summary, previous: ModelDeploymentStatus, now_s: int) -> LoadStatus | None:
    loading = [copy for copy in summary.facts.copies if copy.resident.state in ("fetching", "loading")]
    if not loading:
        return None
    copy = min(loading, key=lambda each: (each.digest != summary.verdict.update, each.worker_id))
    record, before = copy.resident, previous.load
    is_same = before is not None and before.worker == copy.worker_id
    total = max(0, record.bytes_total)
    done = max(0, record.bytes_done)
    if total:
        done = total * (100 * min(done, total) // total) // 100
    return LoadStatus.model_construct(
        worker=copy.worker_id[:253],
        started_at=before.started_at
        if before is not None and is_same
        else _moment(record.since_s) or timestamp_of(now_s),
        bytes_done=done,
        bytes_total=total,
        eta_seconds=_eta_seconds(record.eta_s),
    )


def _eta_seconds(eta_s: float) -> int | None:
    if not 0 < eta_s < _MAX_UNIX_S:
        return None
    seconds = -int(-eta_s // 1)
    return seconds if seconds <= _ETA_EXACT_S else -(-seconds // _ETA_STEP_S) * _ETA_STEP_S


def _last_used(summary: Summary, previous: ModelDeploymentStatus) -> Any:
    found = _moment(max((copy.resident.last_used_s for copy in summary.facts.copies), default=0))
    known = [moment for moment in (found, previous.last_used) if moment is not None]
    return max(known, default=None)


def _last_eviction(facts: ModelFacts, previous: ModelDeploymentStatus) -> EvictionStatus | None:
    found, before = facts.eviction, previous.last_eviction
    at = _moment(found.at_s) if found is not None else None
    if found is None or at is None or (before is not None and before.at > at):
        return before
    return EvictionStatus.model_construct(worker=found.worker_id[:253], reason=found.reason, by=found.by, at=at)


def _last_error(summary: Summary, previous: ModelDeploymentStatus, now_s: int) -> ObjectError | None:
    verdict, before = summary.verdict, previous.last_error
    worker_id, words = summary.failure
    if not verdict.is_accepted:
        code, worker_id, words = verdict.reason, None, verdict.message
    elif words:
        code = LOAD_FAILED
    else:
        is_loaded = any(copy.takes_requests for copy in summary.copies_of(verdict.update))
        return None if before is None or is_loaded or before.code != LOAD_FAILED else before
    message = clean(words, _MAX_ERROR_LENGTH)
    if before is not None and (before.code, before.worker, before.message) == (code, worker_id, message):
        return before
    return ObjectError.model_construct(code=code, message=message, worker=worker_id, at=timestamp_of(now_s))


def _moment(unix_s: float) -> Any:
    """The moment of a worker's Unix seconds; None where they are unknown or no date."""
    return timestamp_of(unix_s) if 0 < unix_s <= _MAX_UNIX_S else None
