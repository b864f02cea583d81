"""The route map of one instant: which models exist, which workers live, what they hold. Pure data and its questions.

Built by the registry reader from Redis, read by everything that answers for a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from naru_proto.errors import ModelNotFound, Unavailable
from naru_proto.registry import ModelInfoRecord, ModelRecord, WorkerRecord

READY = "ready"
MAX_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class RememberedInfo:
    """Facts of a model that may have left all workers since."""

    generation: int
    info: ModelInfoRecord


@dataclass(frozen=True, slots=True)
class Service:
    """What answers to a name: the entry that was asked for, and the model that serves it."""

    entry: ModelRecord
    model: ModelRecord
    """The entry itself, or its target: what workers hold."""

    @property
    def max_wait_s(self) -> float:
        """Longest wait while no copy is ready; 0: the router's own."""
        return self.entry.max_wait_s or self.model.max_wait_s

    @property
    def max_depth(self) -> int:
        """Most requests that wait; 0: the router's own."""
        return self.entry.max_depth or self.model.max_depth


@dataclass(frozen=True)
class RouteMap:
    """What Redis held at one reading. Never changed after it is built."""

    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    """By name."""
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """By worker id; those with a living lease."""
    infos: Mapping[str, ModelInfoRecord] = field(default_factory=dict)
    """By digest."""
    remembered: Mapping[str, RememberedInfo] = field(default_factory=dict)
    """By model; see `remember`."""

    @cached_property
    def _by_name(self) -> dict[str, ModelRecord]:
        named: dict[str, ModelRecord] = {}
        entries = self.entries()
        for name in entries:
            for alias in self.models[name].aliases:
                named.setdefault(alias, self.models[name])
        named.update((name, self.models[name]) for name in entries)  # its own name wins over another's alias
        return named

    def entries(self) -> list[str]:
        """Names of the models that clients may ask for, sorted: no revisions, no aliases."""
        return sorted(name for name, record in self.models.items() if not record.is_revision)

    def names(self) -> list[str]:
        """All names and aliases that can be asked for, sorted."""
        return sorted(self._by_name)

    def resolve(self, name: str) -> Service:
        """What answers to a name or alias. A target is followed once: its own target means nothing here.

        Raises:
            ModelNotFound: listing the known names.
            Unavailable: its target is not there.
        """
        entry = self.entry(name)
        return Service(entry, self._target(entry))

    def has_moved(self, name: str, model: str) -> bool:
        """Whether a name that `model` served is another model's by now. A name that is gone has not moved."""
        entry = self._by_name.get(name)
        if entry is None:
            return False
        serving = entry.target or entry.name
        return serving != model and serving in self.models

    def _target(self, entry: ModelRecord) -> ModelRecord:
        if not entry.target:
            return entry
        target = self.models.get(entry.target)
        if target is None:
            raise Unavailable(
                f"the model {entry.name!r} is served by {entry.target!r}, which is not there; send the request again"
            )
        return target

    def entry(self, name: str) -> ModelRecord:
        """The entry of a name or alias.

        Raises:
            ModelNotFound: listing the known names.
        """
        model = self._by_name.get(name)
        if model is not None:
            return model
        names = self.names()
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        known = ", ".join(names[:MAX_NAMES_SHOWN]) + more if names else "none yet"
        raise ModelNotFound(f"the model {name[:200]!r} does not exist; known models: {known}", param="model")

    def ready_workers(self, model: str) -> list[WorkerRecord]:
        """Workers that hold the model ready and take new requests, by id."""
        return [w for w in self._holders(model) if w.models[model].state == READY and not w.draining]

    def failures(self, model: str) -> list[str]:
        """Why loading failed, worker by worker."""
        return [
            f"{w.worker_id}: {w.models[model].error or 'no reason given'}"
            for w in self._holders(model)
            if w.models[model].state == "failed"
        ]

    def eta_s(self, model: str) -> float:
        """Seconds until some worker has loaded the model, by the workers' own words; 0: unknown."""
        etas = (w.models[model].eta_s for w in self._holders(model) if not w.draining)
        return min((eta_s for eta_s in etas if 0 < eta_s < math.inf), default=0.0)

    def info(self, model: str) -> ModelInfoRecord | None:
        """The model's facts, from the first worker that tells them, ready ones first; else as they were last told."""
        holders = sorted(self._holders(model), key=lambda w: w.models[model].state != READY)
        for worker in holders:
            info = self.infos.get(worker.models[model].info_digest)
            if info is not None:
                return info
        remembered = self.remembered.get(model)
        return remembered.info if remembered is not None else None

    def _holders(self, model: str) -> list[WorkerRecord]:
        return [self.workers[i] for i in sorted(self.workers) if model in self.workers[i].models]


def remember(
    before: Mapping[str, RememberedInfo],
    models: Mapping[str, ModelRecord],
    workers: Mapping[str, WorkerRecord],
    infos: Mapping[str, ModelInfoRecord],
) -> dict[str, RememberedInfo]:
    """What is known of models that were loaded once, so that a chat for one that was evicted can be rendered at once.

    Facts of a generation older than the registry's are dropped: the model may be another one.
    """
    kept = {name: it for name, it in before.items() if name in models and it.generation >= models[name].generation}
    for worker in workers.values():
        for name, resident in worker.models.items():
            info = infos.get(resident.info_digest)
            model = models.get(name)
            if info is not None and model is not None and resident.generation >= model.generation:
                kept[name] = RememberedInfo(resident.generation, info)
    return kept
