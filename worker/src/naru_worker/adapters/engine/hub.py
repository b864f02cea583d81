"""The models of this worker: asks the pure hub what to do, has it done, and tells it what came of it.

Lives in the asyncio thread; blocking work runs in loading threads (`operations`). A load belongs to the worker, not to
the call or the request that asked for it: who leaves does not stop it, and who comes joins it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from naru_proto.beats import until_beat_s
from naru_proto.errors import LoadError, ModelNotFound, NaruError, Unavailable
from naru_worker.adapters.engine.changes import ChangeLog
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.operations import Operations
from naru_worker.adapters.engine.progress import progress_of
from naru_worker.adapters.engine.resident import Progress, Resident, Visit
from naru_worker.core.hub import actions, events
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Tier
from naru_worker.core.residency import ModelState

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
"""About so often the hub sees the KV caches and the time, at least."""


class Holder(Protocol):
    """Keeps the requests that wait for a model."""

    def start_held(self, model: LoadedModel) -> None:
        """The model takes requests now."""

    def reject_held(self, model: str, error: NaruError) -> None:
        """The model will not come up for those that wait."""


class ModelHub:
    """All models. Not thread-safe: asyncio thread only."""

    def __init__(self, core: Hub, operations: Operations, clock: Callable[[], float]) -> None:
        self._core = core
        self._operations = operations
        self._clock = clock
        self._residents: dict[str, Resident] = {}
        self._holder: Holder | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seen_version = -1
        self._pending: deque[events.Result] = deque()
        self._is_feeding = False
        self.is_draining = False
        self.changes = ChangeLog()
        """What has happened and was not told yet."""
        self.listeners: list[Callable[[], None]] = []
        """Called when the state of a model, or of the worker, has changed."""
        self.num_loads = self.num_evictions = self.num_failed_loads = 0

    def attach(self, holder: Holder) -> None:
        """Names who keeps requests that wait; before the first request."""
        self._holder = holder

    def on_change(self) -> None:
        """The state of a model, or of the worker, has changed."""
        for listener in self.listeners:
            listener()

    # --- what there is ------------------------------------------------------------------------------------------

    @property
    def core(self) -> Hub:
        """The decisions; to be read."""
        return self._core

    @property
    def operations(self) -> Operations:
        """The work; to be read."""
        return self._operations

    def now_s(self) -> float:
        """The clock of the entries' times."""
        return self._clock()

    def residents(self) -> list[Resident]:
        """All models that are, or are on their way in or out, or failed to be here, by name."""
        found = [self._residents[entry.name] for entry in self._core.residents() if entry.name in self._residents]
        return sorted(found, key=lambda resident: resident.name)

    def resident(self, name: str) -> Resident | None:
        """One model that is known here."""
        entry = self._core.entry(name)
        return self._residents.get(name) if entry is not None and entry.is_wanted else None

    def models(self) -> list[LoadedModel]:
        """Models in memory, in no order: asked for with every frame that leaves the worker."""
        found = (self._residents.get(entry.name) for entry in self._core.residents())
        return [resident.model for resident in found if resident is not None and resident.model is not None]

    def models_by_name(self) -> dict[str, LoadedModel]:
        """The same, by name."""
        return {model.name: model for model in self.models()}

    def num_known(self) -> int:
        """Models that requests may ask for."""
        return sum(1 for _ in self._core.entries())

    def explain(self, name: str) -> tuple[ModelState, tuple[str, ...]]:
        """State of a model, and why.

        Raises:
            ModelNotFound: it is not known here.
        """
        entry = self._core.entry(name)
        if entry is None or not entry.is_wanted:
            raise self._unknown(name)
        return entry.state, self._core.explain(name, self._clock())

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrive(self, name: str) -> tuple[Visit, LoadedModel | None]:
        """A request has come; to be ended by `leave`. No model: hold it until the holder is told.

        Raises:
            ModelNotFound: it is not known here.
            Unavailable: the worker takes no more requests, or the model cannot come up.
        """
        if self.is_draining:
            raise Unavailable("this worker is draining; ask another one")
        resident = self._residents.get(name)
        if resident is None or not resident.entry.is_wanted:
            raise self._unknown(name)
        visit = Visit(name, is_held=not resident.state.is_serving)
        if visit.is_held:
            resident.held.add(visit)
        self._feed(events.RequestArrived(name))
        if visit.rejected is not None:
            raise visit.rejected
        # An engine that is still being loaded takes requests as soon as it exists.
        is_starting = resident.state is ModelState.LOADING and not resident.stop.is_set()
        return visit, resident.model if resident.state.is_serving or is_starting else None

    def leave(self, visit: Visit) -> None:
        """A request has ended."""
        resident = self._residents.get(visit.model)
        if resident is not None:
            resident.held.discard(visit)
        # Rejected ones the hub counts no more.
        if visit.rejected is None:
            self._feed(events.RequestEnded(visit.model, was_held=visit.is_held))

    # --- commands -----------------------------------------------------------------------------------------------------

    async def load(self, ask: events.Ask, load_timeout_s: float = 0.0) -> AsyncIterator[Progress]:
        """Asks for a model and tells how it goes, up to its tier or a failure. Leaving early does not stop it.

        Raises:
            InvalidRequest: an older command, or a generation that stands for something else.
            LoadError: it can never fit.
            Unavailable: the worker is draining.
        """
        if self.is_draining:
            raise Unavailable("this worker is draining; load the model on another one")
        done = self._core.ask(ask, self._clock())
        resident = self._known(ask.model)
        resident.load_timeout_s = load_timeout_s
        self._apply(done)
        self.on_change()  # a model that is only known changes no state
        shown: Progress | None = None
        num_arrivals = resident.num_arrivals
        while True:
            changed = resident.changed
            if resident.spec != ask.spec:
                newest = resident.entry.generation
                error = LoadError(f"the load of model {ask.model!r} was overtaken by generation {newest}")
                yield Progress(ModelState.FAILED, error=error)
                return
            progress = progress_of(self._core, resident, self._clock(), with_reason=True)
            # Where it was evicted the moment it had arrived, it has arrived all the same.
            has_arrived = ask.tier is Tier.ACTIVE and resident.num_arrivals > num_arrivals
            if has_arrived and not resident.state.is_serving and resident.state is not ModelState.FAILED:
                progress = Progress(ModelState.READY, detail="it was evicted again at once; a request brings it back")
            is_over = has_arrived or self._is_over(resident, ask.tier)
            if progress != shown and (is_over or progress.state in (ModelState.FETCHING, ModelState.LOADING)):
                shown = progress
                yield progress
            if is_over:
                return
            await changed.wait()

    async def unload(self, release: events.Release) -> None:
        """Asks for a model to leave, and waits until it has, or something else is asked for.

        Raises:
            InvalidRequest: an older command.
        """
        done = self._core.release(release, self._clock())
        resident = self._residents.get(release.model)
        self._apply(done)
        if resident is None:
            return
        while not self._is_down(resident, release):
            await resident.changed.wait()
        self._forget(resident)

    def move(self, move: events.Move) -> Progress:
        """Brings a known model nearer or farther, by the orders there are for it; how it stands once that is under way.

        Raises:
            ModelNotFound: it is not known here.
            InvalidRequest: an older command, or a field out of range.
            LoadError: it can never fit.
            Unavailable: the worker is draining, the model has requests and may be moved only without, or it fails.
        """
        if self.is_draining and move.tier is not Tier.COLD:
            raise Unavailable("this worker is draining; bring the model up on another one")
        self._apply(self._core.move(move, self._clock()))
        self.on_change()
        return progress_of(self._core, self._known(move.model), self._clock())

    def progress(self, resident: Resident) -> Progress:
        """How a model stands now, without a reason."""
        return progress_of(self._core, resident, self._clock())

    async def close(self, timeout_s: float) -> None:
        """Gives back every model: draining is over by now. A load that cannot be broken off is left behind."""
        for resident in tuple(self._residents.values()):
            entry = resident.entry
            release = events.Release(entry.name, entry.generation, entry.fencing_token)
            self._apply(self._core.release(release, self._clock()))
        tasks = {r.task for r in self._residents.values() if r.task is not None}
        deadline_s = self._clock() + timeout_s
        while tasks and (left_s := deadline_s - self._clock()) > 0:
            await asyncio.wait(tasks, timeout=left_s)
            await asyncio.sleep(0)  # the last task's own result may have begun another
            tasks = {r.task for r in self._residents.values() if r.task is not None}
        if self._timer is not None:
            self._timer.cancel()
        self._operations.close()

    # --- the cycle: events in, actions out ----------------------------------------------------------------------

    def report(self, event: events.Result) -> None:
        """An operation tells its result."""
        self._feed(event)

    def show(self, resident: Resident, progress: Progress) -> None:
        """An operation tells how far it is."""
        resident.tell(progress, self._clock())
        self.on_change()

    def open_engine(self, resident: Resident, model: LoadedModel) -> None:
        """The engine of a load takes requests, though not all weights may be there."""
        resident.model = model
        if self._holder is not None:
            self._holder.start_held(model)

    def _feed(self, event: events.Result) -> None:
        self._pending.append(event)
        if not self._is_feeding:
            self._apply(())

    def _apply(self, todo: tuple[actions.Action, ...]) -> None:
        """One after the other: what an action brings about at once (a rejected request has ended) is fed after it."""
        self._is_feeding = True
        try:
            self._carry_out(todo)
            while self._pending:
                self._observe_kv()
                event = self._pending.popleft()
                self._carry_out(self._core.handle(event, self._clock()))
                if isinstance(event, events.Loaded):
                    self._loaded(event.model)
        finally:
            self._is_feeding = False
        self._set_timer()

    def _loaded(self, name: str) -> None:
        resident = self._residents[name]
        self.num_loads += 1
        resident.num_arrivals += 1
        resident.notify()
        if not resident.state.is_serving:
            return
        for visit in resident.held:
            visit.is_held = False
        resident.held.clear()
        if self._holder is not None and resident.model is not None:
            self._holder.start_held(resident.model)

    def _observe_kv(self) -> None:
        """Tells the hub what the engines have booked meanwhile."""
        ledger = self._operations.bookings.ledger
        if ledger.version == self._seen_version:
            return
        self._seen_version = ledger.version
        kv_bytes = {m: n for m, n in ledger.view().kv.items() if m in self._residents}
        changed = {m: n for m, n in kv_bytes.items() if self._residents[m].entry.kv_bytes != n}
        if changed:
            self._carry_out(self._core.handle(events.KVChanged(changed), self._clock()))

    def _carry_out(self, todo: tuple[actions.Action, ...]) -> None:
        for action in todo:
            if isinstance(action, actions.Changed):
                self._tell(action)
            elif isinstance(action, actions.RejectHeld):
                self._reject(action)
            elif isinstance(action, actions.Stop):
                self._known(action.model).stop.set()
            elif isinstance(action, actions.TrimKV):
                self._operations.trim_kv(self, self._known(action.model), action.num_bytes)
            else:
                self._operations.begin(self, self._known(action.model), action)

    def _tell(self, change: actions.Changed) -> None:
        resident = self._known(change.model)
        resident.notify()
        if change.old.is_serving and change.new.is_serving:
            return  # a request began or ended: nothing that others follow has changed
        self.num_evictions += change.is_eviction
        self.num_failed_loads += change.new is ModelState.FAILED
        _log.info("model %s: %s -> %s: %s", change.model, change.old.value, change.new.value, change.reason)
        self.changes.add(change)
        self.on_change()

    def _reject(self, reject: actions.RejectHeld) -> None:
        if self._holder is None:
            return
        again = f"; try again in {reject.retry_s:.0f} s" if reject.retry_s > 0 else ""
        error = Unavailable(f"model {reject.model!r} cannot be served here: {reject.reason}{again}", param="model")
        error.retry_after_s = reject.retry_s
        resident = self._known(reject.model)
        for visit in resident.held:
            visit.rejected = error
        resident.held.clear()
        self._holder.reject_held(reject.model, error)

    def _set_timer(self) -> None:
        now_s = self._clock()
        wake_s = self._core.next_wake_s(now_s)
        loop = asyncio.get_running_loop()
        delay_s = until_beat_s(loop.time(), _PERIOD_S)
        if wake_s is not None:
            delay_s = min(delay_s, max(0.0, wake_s - now_s) + 0.001)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        returned = self._operations.bytes_returned()
        if returned:
            self._feed(events.BytesReturned(returned))
        self._feed(events.Tick())

    def _known(self, name: str) -> Resident:
        resident = self._residents.get(name)
        if resident is None:
            entry = self._core.entry(name)
            assert entry is not None, "the hub speaks of models it knows"
            resident = self._residents[name] = Resident(name, entry)
        return resident

    def _forget(self, resident: Resident) -> None:
        """The hub keeps the generation; nothing else of a forgotten model is needed."""
        if not resident.entry.is_wanted and resident.task is None and resident.model is None and not resident.held:
            self._residents.pop(resident.name, None)

    def _is_over(self, resident: Resident, tier: Tier) -> bool:
        entry = resident.entry
        if entry.state is ModelState.FAILED:
            return not entry.is_busy
        if tier is Tier.COLD:
            return True
        if entry.state.is_serving and entry.loaded_spec == entry.spec:
            return True
        # It may also rest short of its tier: there is no host memory, or it was evicted meanwhile.
        return self._core.is_settled(entry.name)

    def _is_down(self, resident: Resident, release: events.Release) -> bool:
        """Whether a release has come true, or something else was asked for since."""
        entry, tier = resident.entry, release.tier or Tier.COLD
        if entry.generation != release.generation or entry.tier > tier or (entry.is_wanted and release.tier is None):
            return True
        highest = ModelState.HOST if tier is Tier.HOST else ModelState.COLD
        return not entry.is_busy and entry.state in (highest, ModelState.COLD, ModelState.FAILED)

    def _unknown(self, name: str) -> ModelNotFound:
        loaded = ", ".join(sorted(model.name for model in self.models())[:20]) or "none"
        return ModelNotFound(f"model {name[:128]!r} is not known to this worker; loaded are: {loaded}", param="model")
