"""The route map of one instant: which models exist, which workers live, what they hold. Pure data and its questions.

Built by the registry reader from Redis, read by everything that answers for a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from naru_proto.errors import ModelNotFound, Unavailable
from naru_proto.registry import FootprintRecord, KnownRecord, ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.tenancy.picking import pick_weighted
from naru_router.core.tenancy.visibility import may_use

READY = "ready"
MAX_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class RememberedInfo:
    """Facts of a model that may have left all workers since."""

    generation: int
    info: ModelInfoRecord


@dataclass(frozen=True, slots=True)
class Service:
    """What answers to a name: the entry that takes the request, and the model that serves it."""

    entry: ModelRecord
    model: ModelRecord
    """The entry itself, or its target: what workers hold."""
    asked: ModelRecord | None = None
    """The entry that was asked for, where it is another one: it has split its requests, or cannot be served."""
    is_stand_in: bool = False
    """What should have answered cannot be served."""

    @property
    def answers_as(self) -> str:
        """Name of the entry that answers where another one was asked for; else empty. See names.HEADER_MODEL."""
        return self.entry.name if self.asked is not None else ""

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
    known: Mapping[str, Mapping[str, KnownRecord]] = field(default_factory=dict)
    """Worker id to model to what the worker has of it without holding it."""
    footprints: Mapping[str, FootprintRecord] = field(default_factory=dict)
    """By model: what a copy takes, as measured."""
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by node, where they are told."""
    is_read: bool = True
    """False: nothing was read yet, so that nothing is known, not even that a model does not exist."""

    @cached_property
    def _by_name(self) -> dict[str, ModelRecord]:
        named: dict[str, ModelRecord] = {}
        entries = self.entries()
        for name in entries:
            for alias in self.models[name].aliases:
                named.setdefault(alias, self.models[name])
        named.update((name, self.models[name]) for name in entries)  # its own name wins over another's alias
        return named

    def entries(self, caller: Caller | None = None) -> list[str]:
        """Names of the models that clients may ask for, sorted: no revisions, no aliases. None: of all callers."""
        return sorted(
            name
            for name, record in self.models.items()
            if not record.is_revision and (caller is None or may_use(caller, record))
        )

    def names(self, caller: Caller | None = None) -> list[str]:
        """All names and aliases that can be asked for, sorted; those a caller may know of, or all for None."""
        if caller is None:
            return sorted(self._by_name)
        return sorted(name for name, entry in self._by_name.items() if may_use(caller, entry))

    def resolve(self, name: str, caller: Caller = ANYONE, pick: float = 0.0) -> Service:
        """What answers to a name or alias. A target is followed once: its own target means nothing here.

        Args:
            name: what was asked for.
            caller: who asks.
            pick: in [0, 1): which of the entries takes it where the entry splits its requests. Equal for requests that
                belong together (see core.tenancy.picking).

        Raises:
            ModelNotFound: listing the names the caller may know of.
            Unavailable: its target is not there.
        """
        asked = self.entry(name, caller)
        entry = self._picked(asked, caller, pick)
        return Service(entry, self._target(entry), None if entry is asked else asked)

    def fallbacks_of(self, service: Service, caller: Caller = ANYONE) -> list[Service]:
        """What may answer in its place where no copy of it can be had, in the order to try.

        Those of the entry that was asked for; what they split or fall back to themselves means nothing here.
        """
        return self._fallbacks(service.asked or service.entry, service.model.name, caller)

    def stand_ins(self, name: str, caller: Caller = ANYONE, pick: float = 0.0) -> list[Service]:
        """The same for a name, as for `resolve`, whose own target may not be there.

        Raises:
            ModelNotFound: listing the names the caller may know of.
        """
        asked = self.entry(name, caller)
        entry = self._picked(asked, caller, pick)
        return self._fallbacks(asked, entry.target or entry.name, caller)

    def _fallbacks(self, asked: ModelRecord, model: str, caller: Caller) -> list[Service]:
        found = []
        for name in asked.fallbacks:
            entry = self._other(name, caller)
            serving = self.models.get(entry.target or entry.name) if entry is not None else None
            if entry is not None and serving is not None and serving.name != model:
                found.append(Service(entry, serving, None if entry is asked else asked, is_stand_in=True))
        return found

    def _picked(self, asked: ModelRecord, caller: Caller, pick: float) -> ModelRecord:
        if not asked.split:
            return asked
        shares = [(self._other(name, caller), weight) for name, weight in asked.split]
        return pick_weighted([(entry, weight) for entry, weight in shares if entry is not None], pick) or asked

    def _other(self, name: str, caller: Caller) -> ModelRecord | None:
        """An entry that another one leads to, by its own name; None: there is none for the caller."""
        entry = self.models.get(name)
        return entry if entry is not None and not entry.is_revision and may_use(caller, entry) else None

    def has_moved(self, name: str, model: str) -> bool:
        """Whether a name that `model` served is another model's by now. A name that is gone has not moved."""
        entry = self._by_name.get(name)
        if entry is None or model == (entry.target or entry.name):
            return False
        others = (self.models.get(other) for other in (*(other for other, _ in entry.split), *entry.fallbacks))
        serving = {it.target or it.name for it in (entry, *others) if it is not None}
        return model not in serving and not serving.isdisjoint(self.models)

    def _target(self, entry: ModelRecord) -> ModelRecord:
        if not entry.target:
            return entry
        target = self.models.get(entry.target)
        if target is None:
            raise Unavailable(
                f"the model {entry.name!r} is served by {entry.target!r}, which is not there; send the request again"
            )
        return target

    def entry(self, name: str, caller: Caller = ANYONE) -> ModelRecord:
        """The entry of a name or alias.

        Raises:
            ModelNotFound: listing the names the caller may know of. One that is hidden does not exist.
            Unavailable: nothing was read yet.
        """
        model = self._by_name.get(name)
        if model is not None and may_use(caller, model):
            return model
        if not self.is_read:
            raise Unavailable("this router has not read which models there are yet; send the request again")
        names = self.names(caller)
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        known = ", ".join(names[:MAX_NAMES_SHOWN]) + more if names else "none yet"
        raise ModelNotFound(f"the model {name[:200]!r} does not exist; known models: {known}", param="model")

    @cached_property
    def has_splits(self) -> bool:
        """Whether any entry shares its requests with others."""
        return any(record.split for record in self.models.values())

    def ready_workers(self, model: str) -> Sequence[WorkerRecord]:
        """Workers that hold the model ready and take new requests, by id."""
        found = self._ready.get(model)
        if found is None:
            ready = [w for w in self._holders(model) if w.models[model].state == READY and not w.draining]
            found = self._ready[model] = tuple(ready)
        return found

    def copies(self, model: str) -> list[ResidentRecord]:
        """The model on each worker that tells of it, in whatever state, by worker id."""
        return [worker.models[model] for worker in self._holders(model)]

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
        try:
            return self._facts[model]
        except KeyError:
            found = self._facts[model] = self._find_info(model)
            return found

    def _find_info(self, model: str) -> ModelInfoRecord | None:
        holders = sorted(self._holders(model), key=lambda w: w.models[model].state != READY)
        for worker in holders:
            info = self.infos.get(worker.models[model].info_digest)
            if info is not None:
                return info
        remembered = self.remembered.get(model)
        return remembered.info if remembered is not None else None

    def _holders(self, model: str) -> list[WorkerRecord]:
        found = self._held.get(model)
        if found is None:
            found = self._held[model] = [each for each in self._sorted_workers if model in each.models]
        return found

    @cached_property
    def _held(self) -> dict[str, list[WorkerRecord]]:
        """Who holds a model, filled as it is asked for: each request asks. So are the two that follow."""
        return {}

    @cached_property
    def _ready(self) -> dict[str, tuple[WorkerRecord, ...]]:
        return {}

    @cached_property
    def _facts(self) -> dict[str, ModelInfoRecord | None]:
        return {}

    @cached_property
    def _sorted_workers(self) -> list[WorkerRecord]:
        return [self.workers[worker_id] for worker_id in sorted(self.workers)]


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
