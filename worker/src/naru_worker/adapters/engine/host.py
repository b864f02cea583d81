"""The models of this worker: loads and unloads them one step at a time each, and books their memory.

Lives in the asyncio thread; blocking work goes to threads of its own, so that serving goes on. A load belongs to the
worker, not to the call that asked for it: who leaves does not stop it, and a second call joins it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from naru_proto.errors import InternalError, LoadError, ModelNotFound, NaruError, Unavailable
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import Loader, Memory, Superseded
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.core.memory_plan import plan_memory
from naru_worker.core.residency import Desired, ModelSpec, ModelState, ask_load, ask_unload

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_KNOWN_MODELS = 1024
"""Names remembered for their generation after an unload; the oldest are forgotten."""


class ModelHost:
    """All models. Not thread-safe: asyncio thread only."""

    def __init__(
        self,
        loader: Loader,
        loop: EngineLoop,
        memory: Memory,
        budget_bytes: int,
        drain: Callable[[LoadedModel, float], Awaitable[None]],
        load_timeout_s: float,
    ) -> None:
        """`drain` returns when no request of the model is left; it ends them when the seconds given are over."""
        self._loader = loader
        self._loop = loop
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._drain = drain
        self._load_timeout_s = load_timeout_s
        self._residents: dict[str, Resident] = {}
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="load")
        self.epoch = 0
        """Grows whenever the caches of a model become void."""
        self.is_draining = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when the state of a model, or of the worker, has changed."""

    def serving(self, name: str) -> LoadedModel:
        """The model, if it takes requests now.

        Raises:
            ModelNotFound: it is not known here.
            Unavailable: it is loading or leaving, or the worker takes no more requests.
        """
        if self.is_draining:
            raise Unavailable("this worker is draining; ask another one")
        resident = self._residents.get(name)
        if resident is not None and resident.model is not None and not resident.model.is_closed:
            return resident.model
        if resident is None or resident.state is ModelState.COLD:
            known = ", ".join(sorted(r.name for r in self._residents.values() if r.model is not None)) or "none"
            raise ModelNotFound(
                f"model {name[:128]!r} is not loaded on this worker; loaded are: {known}", param="model"
            )
        if resident.progress.error is not None:
            raise Unavailable(f"model {name!r} failed to load here: {resident.progress.error.message}", param="model")
        raise Unavailable(f"model {name!r} is {resident.state.value} on this worker; ask again soon", param="model")

    def residents(self) -> list[Resident]:
        """All models that are, or are to be, or failed to be here, by name."""
        return sorted((r for r in self._residents.values() if r.state is not ModelState.COLD), key=lambda r: r.name)

    def models(self) -> list[LoadedModel]:
        """Models in memory."""
        return [r.model for r in self._residents.values() if r.model is not None]

    async def load(self, name: str, generation: int, spec: ModelSpec) -> AsyncIterator[Progress]:
        """Asks for a model and tells how it goes, up to READY or FAILED. Leaving early does not stop the load.

        Raises:
            InvalidRequest: an older generation, or one that stands for something else.
            Unavailable: the worker is draining.
        """
        if self.is_draining:
            raise Unavailable("this worker is draining; load the model on another one")
        resident = self._residents.get(name)
        desired = ask_load(name, resident.desired if resident else None, generation, spec)
        resident = self._desire(name, desired)
        shown: Progress | None = None
        while True:
            changed, progress = resident.changed, resident.progress
            if resident.desired.spec != spec:
                newest = resident.desired.generation
                error = LoadError(f"the load of model {name!r} was overtaken by generation {newest}")
                yield Progress(ModelState.FAILED, error=error)
                return
            is_over = resident.task is None
            if progress is not shown and (is_over or progress.state in (ModelState.FETCHING, ModelState.LOADING)):
                shown = progress
                yield progress
            if is_over:
                return
            await changed.wait()

    async def unload(self, name: str, generation: int, drain_timeout_s: float) -> None:
        """Asks for a model to leave, and waits until it has. An unknown one has left already.

        Raises:
            InvalidRequest: an older generation.
        """
        resident = self._residents.get(name)
        desired = ask_unload(name, resident.desired if resident else None, generation)
        resident = self._desire(name, desired, drain_timeout_s)
        while resident.task is not None and resident.desired == desired:
            await resident.changed.wait()

    async def close(self, timeout_s: float) -> None:
        """Gives back every model: draining is over by now. A load that cannot be broken off is left behind."""
        for resident in tuple(self._residents.values()):
            self._desire(resident.name, Desired(resident.desired.generation, None))
        tasks = [r.task for r in self._residents.values() if r.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _desire(self, name: str, desired: Desired, drain_timeout_s: float = 0.0) -> Resident:
        resident = self._residents.pop(name, None) or Resident(name, desired)
        self._residents[name] = resident  # newest last: the oldest tombstones go first
        resident.desired = desired
        resident.drain_timeout_s = drain_timeout_s
        if resident.task is None and not self._is_settled(resident):
            resident.task = asyncio.create_task(self._converge(resident))
        resident.show(resident.progress)  # wakes those whose wish was overtaken
        cold = [r for r in self._residents.values() if r.state is ModelState.COLD and r.task is None]
        for forgotten in cold[: max(0, len(cold) - MAX_KNOWN_MODELS)]:
            del self._residents[forgotten.name]
        return resident

    @staticmethod
    def _is_settled(resident: Resident) -> bool:
        """What is, is what is desired. A failed load is not: asking again tries again."""
        if resident.desired.spec is None:
            return resident.model is None and resident.state is ModelState.COLD
        return resident.model is not None and resident.loaded_spec == resident.desired.spec

    async def _converge(self, resident: Resident) -> None:
        """One change after the other, until nothing differs or a load has failed."""
        try:
            while not self._is_settled(resident):
                wanted = resident.desired
                if resident.model is not None:
                    await self._retire(resident, resident.model)
                elif wanted.spec is None:
                    self._show(resident, Progress(ModelState.COLD))
                else:
                    await self._bring(resident, wanted.spec)
                if resident.state is ModelState.FAILED and resident.desired.spec == wanted.spec:
                    break
        except Exception as exc:
            # The top of a task: without this the model would stand in between for ever, and nobody would know.
            _log.error("changing model %s failed", resident.name, exc_info=exc)
            error = InternalError(f"changing model {resident.name!r} failed inside the worker ({type(exc).__name__})")
            resident.progress = Progress(ModelState.FAILED, error=error)
        finally:
            resident.task = None
            self._show(resident, resident.progress)

    async def _bring(self, resident: Resident, spec: ModelSpec) -> None:
        """Loads; whatever goes wrong becomes the state FAILED with its reason."""
        self._show(resident, Progress(ModelState.FETCHING, detail=spec.uri))
        try:
            async with asyncio.timeout(self._load_timeout_s):
                model = await self._load(resident, spec)
        except Superseded:
            self._book(resident, 0)
            return
        except TimeoutError:
            error: NaruError = LoadError(f"model {resident.name!r} did not load within {self._load_timeout_s:g} s")
        except NaruError as exc:
            error = exc
        except MemoryError:
            error = LoadError(f"model {resident.name!r} does not fit into memory; unload another model")
        except Exception as exc:
            # The top of a load: whatever a hostile file can provoke must not end the worker.
            _log.error("loading model %s failed", resident.name, exc_info=exc)
            error = InternalError(
                f"loading model {resident.name!r} failed inside the worker ({type(exc).__name__}: {exc})"
            )
        else:
            resident.model, resident.loaded_spec = model, spec
            self._loop.add(model.engine)
            self._show(resident, Progress(ModelState.READY, detail=model.facts.revision))
            # What reading the files has left behind; nobody waits for it.
            self._threads.submit(self._memory.release)
            return
        self._book(resident, 0)
        self._show(resident, Progress(ModelState.FAILED, error=error))

    async def _load(self, resident: Resident, spec: ModelSpec) -> LoadedModel:
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()

        def show(progress: Progress) -> None:
            if resident.task is current and resident.state is ModelState.FETCHING:
                self._show(resident, progress)

        def on_progress(progress: Progress) -> None:
            # In the loading thread: reading one reference is safe without a lock.
            if resident.desired.spec != spec or resident.task is not current:
                raise Superseded
            loop.call_soon_threadsafe(show, progress)

        opened = await self._in_thread(
            functools.partial(self._loader.open, resident.name, spec, on_progress), lambda late: late.close()
        )
        try:
            if resident.desired.spec != spec:
                raise Superseded
            plan = plan_memory(resident.name, opened.need, opened.wish, self.free_bytes())
            self._book(resident, plan.total_bytes)
            self._show(resident, Progress(ModelState.LOADING, 0, plan.total_bytes, plan.reason))
            build = self._in_thread(functools.partial(opened.build, plan), lambda late: late.release())
        except BaseException:
            opened.close()
            raise
        return await build

    async def _in_thread(self, work: Callable[[], _T], discard: Callable[[_T], None]) -> _T:
        """Result of `work`; when nobody waits for it any more, it is thrown away once it is there."""
        future = self._threads.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                future.add_done_callback(lambda done: None if done.exception() else discard(done.result()))
            raise

    async def _retire(self, resident: Resident, model: LoadedModel) -> None:
        """Takes a model out: no new request, the running ones end, the engine lets go, memory comes back."""
        model.is_closed = True
        self._show(resident, Progress(ModelState.DRAINING))
        await self._drain(model, resident.drain_timeout_s)
        loop = asyncio.get_running_loop()
        removed = asyncio.Event()
        self._loop.remove(model.engine, lambda: loop.call_soon_threadsafe(removed.set))
        await removed.wait()
        await loop.run_in_executor(self._threads, model.release)
        resident.model = resident.loaded_spec = None
        del model
        await loop.run_in_executor(self._threads, self._memory.release)
        self._book(resident, 0)
        self.epoch += 1
        self._show(resident, Progress(ModelState.COLD))

    def free_bytes(self) -> int:
        """What a load may take: left of the budget, and really there."""
        booked = sum(r.booked_bytes for r in self._residents.values())
        not_taken_yet = sum(r.booked_bytes for r in self._residents.values() if r.model is None)
        return max(0, min(self._budget_bytes - booked, self._memory.available_bytes() - not_taken_yet))

    @staticmethod
    def _book(resident: Resident, num_bytes: int) -> None:
        resident.booked_bytes = num_bytes

    def _show(self, resident: Resident, progress: Progress) -> None:
        resident.show(progress)
        self.on_change()
