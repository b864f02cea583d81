"""The workers as the plan for models asks about them: who holds a revision, how, and what room is left. Pure.

Built once for each plan from its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naru_operator.core.model_plan import ABSENT, UP
from naru_operator.core.models.model import ClusterWorker
from naru_operator.core.placement import PlacementFacts, worker_slot
from naru_proto import names
from naru_proto.placement import WorkerSlot
from naru_proto.registry import ModelRecord, ResidentRecord

READY = ("ready", "active")


@dataclass(frozen=True, slots=True)
class Copy:
    """One revision on one worker, known ones included."""

    worker_id: str
    state: str
    """Lower-case ModelState, KNOWN or EVICTED."""
    is_staying: bool
    """Its worker takes models."""
    is_ready: bool
    """It takes requests now, by the worker's own word."""
    error: str
    """Why it failed; empty where it did not."""
    generation: int

    @property
    def is_up(self) -> bool:
        """Whether it serves or is on its way to."""
        return self.state in UP


class Fleet:
    """All living workers, and what they hold. Never changed after it is built."""

    def __init__(self, workers: Mapping[str, ClusterWorker], failed: Mapping[str, str]) -> None:
        """``failed``: what commands failed with where no lease tells it."""
        self._workers = dict(sorted(workers.items()))
        self._failed = failed
        self._copies: dict[str, list[Copy]] = {}
        for worker in self._workers.values():
            for name, held in worker.models.items():
                copy = _copy(worker, name, held.state, held.generation)
                self._copies.setdefault(name, []).append(copy)
        self.staying = {worker_id: each for worker_id, each in self._workers.items() if is_staying(each)}
        """Workers that take models, in name order."""

    @property
    def names(self) -> Iterable[str]:
        """Every revision that some worker holds or knows."""
        return self._copies.keys()

    def copies(self, name: str) -> list[Copy]:
        """Where a revision is held or known, by worker; ones that are gone or going left out."""
        return [each for each in self._copies.get(name, ()) if each.state not in ABSENT]

    def has(self, name: str) -> bool:
        """Whether any worker holds or knows a revision, or still gives it up."""
        return any(each.state != "cold" for each in self._copies.get(name, ()))

    def is_held(self, name: str) -> bool:
        """Whether a worker that takes models holds or knows a revision, or still gives it up."""
        return any(each.state != "cold" and each.is_staying for each in self._copies.get(name, ()))

    def num_ready(self, name: str) -> int:
        """Copies that take requests, those on leaving workers included."""
        return sum(each.is_ready for each in self.copies(name))

    def failure(self, name: str) -> str:
        """Worker and its words where a copy has failed, or what a command failed with; empty: nothing has.

        Workers that leave are not asked: their copies are not tried again.
        """
        copies = [each for each in self.copies(name) if each.is_staying]
        for each in copies:
            if each.state == "failed":
                return f"{each.worker_id}: {each.error or self._failed.get(name, '') or 'no reason given'}"
        return "" if any(each.is_up for each in copies) else self._failed.get(name, "")

    def generations(self) -> dict[str, int]:
        """Name to the newest generation that a worker has of it."""
        return {name: max(each.generation for each in copies) for name, copies in self._copies.items()}

    def num_bytes(self, name: str) -> int:
        """What a copy takes, by the largest there is; 0: nobody has loaded it."""
        sizes = (self._workers[each.worker_id].record.models.get(name) for each in self._copies.get(name, ()))
        return max((_size(resident) for resident in sizes if resident is not None), default=0)

    def slots(
        self, facts: PlacementFacts, num_bytes: Mapping[str, int], records: Mapping[str, ModelRecord]
    ) -> list[WorkerSlot]:
        """The workers that take models, with their room. ``num_bytes``: what copies take whose load only begins."""
        return [
            worker_slot(worker.record, worker.models, facts, num_bytes, records) for worker in self.staying.values()
        ]


def is_staying(worker: ClusterWorker) -> bool:
    """Whether models may be brought there."""
    return not worker.record.leaving and not worker.record.draining


def _copy(worker: ClusterWorker, name: str, state: str, generation: int) -> Copy:
    resident = worker.record.models.get(name)
    # A command that failed, or that began and is not answered, says less than what the lease shows since.
    if resident is not None and resident.state in UP and state in ("failed", "loading") and state != resident.state:
        state = resident.state
    is_serving = resident is not None and resident.state in READY and not worker.record.draining
    return Copy(
        worker.record.worker_id,
        state,
        is_staying(worker),
        is_serving and state in READY,
        resident.error if resident is not None and state == "failed" else "",
        generation,
    )


def _size(resident: ResidentRecord) -> int:
    return max(0, resident.num_bytes, resident.weight_bytes + resident.kv_bytes)


def revisions_by_model(found: Iterable[str]) -> dict[str, list[str]]:
    """ModelDeployment's name to the registry names of its revisions among ``found``, each once and in order."""
    result: dict[str, list[str]] = {}
    for name in sorted(set(found)):
        base = names.base_name(name)
        if base != name:
            result.setdefault(base, []).append(name)
    return result
