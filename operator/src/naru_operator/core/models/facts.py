"""What the workers say of one ModelDeployment: the material of its status. Pure.

Read from leases and from the stream of events, which the controller follows; both are the workers' truth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from naru_operator.core.model_plan import EVICTED, KNOWN, UP
from naru_operator.core.models.fleet import READY
from naru_operator.core.models.model import ClusterWorker, Verdict
from naru_proto import names
from naru_proto.crd.model_status import EvictionReason
from naru_proto.registry import ResidentRecord

_LEFT = ("draining", "host", "cold")
_FOR_ANOTHER = re.compile(r"evicted for ['\"]([^'\"]{1,300})['\"]")


@dataclass(frozen=True, slots=True)
class CopyFact:
    """A copy that a worker's lease shows."""

    worker_id: str
    pool: str
    digest: str
    """Of its revision."""
    resident: ResidentRecord
    takes_requests: bool

    @property
    def is_up(self) -> bool:
        """Whether it serves or is on its way to."""
        return self.resident.state in UP

    @property
    def is_failed(self) -> bool:
        """Whether its load failed."""
        return self.resident.state == "failed"


@dataclass(frozen=True, slots=True)
class Eviction:
    """A copy that left the engine by its worker's decision or by a command."""

    worker_id: str
    reason: EvictionReason
    by: str | None
    """ModelDeployment it made room for."""
    at_s: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of the revision that serves and of the one the spec asks for."""

    copies: tuple[CopyFact, ...] = ()
    """By worker; the one that serves first."""
    num_known: int = 0
    """Workers whose copy of the revision the spec asks for rests: on demand, or evicted."""
    failed: str = ""
    """What the last command about that revision failed with, where no lease tells it."""
    eviction: Eviction | None = None
    """The last one that is known of."""
    resolved_revision: str = ""
    """What the sources made of the revision that serves; empty: not known."""


def model_facts(
    verdict: Verdict,
    workers: Mapping[str, ClusterWorker],
    failed: Mapping[str, str],
    evictions: Mapping[str, Eviction],
) -> ModelFacts:
    """Facts of one object. ``failed`` and ``evictions`` are by registry name, the latter the last one of each."""
    model = verdict.key.name
    digests = [digest for digest in dict.fromkeys((verdict.current, verdict.update)) if digest]
    copies: list[CopyFact] = []
    num_known = 0
    for worker_id, worker in sorted(workers.items()) if digests else ():
        record = worker.record
        for digest in digests:
            name = names.revision_name(model, digest)
            resident = record.models.get(name)
            if resident is not None and resident.state != "cold":
                takes = resident.state in READY and not record.draining
                copies.append(CopyFact(worker_id, record.pool, digest, resident, takes))
            elif digest == verdict.update and name in worker.models:
                at_rest = (KNOWN, EVICTED) if verdict.is_on_demand else (EVICTED,)
                num_known += worker.models[name].state in at_rest and not record.draining
    found = [each for digest in digests if (each := evictions.get(names.revision_name(model, digest))) is not None]
    return ModelFacts(
        tuple(copies),
        num_known,
        failed.get(names.revision_name(model, verdict.update), "") if verdict.update else "",
        max(found, key=lambda each: each.at_s, default=None),
    )


def read_eviction(worker_id: str, old: str, new: str, reason: str, at_s: float) -> Eviction | None:
    """The eviction that an event of the stream tells of; None: it tells of something else."""
    if old not in READY or new not in _LEFT:
        return None
    other = _FOR_ANOTHER.search(reason)
    if other is not None:
        return Eviction(worker_id, "Pressure", names.base_name(other[1])[:253], at_s)
    if "high watermark" in reason:
        return Eviction(worker_id, "Pressure", None, at_s)
    if "idle limit" in reason:
        return Eviction(worker_id, "Idle", None, at_s)
    if "released it" in reason:
        return Eviction(worker_id, "Requested", None, at_s)
    return None
