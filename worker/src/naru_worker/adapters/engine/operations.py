"""What the hub has done, one function each: fetch, raise to host, load, drain, unload, drop.

Called by the model hub's shell in the asyncio thread; the blocking halves run in loading threads. Every operation ends
in exactly one report, and whatever goes wrong inside becomes a failure with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from naru_proto.errors import InternalError, LoadError, NaruError, Unavailable
from naru_worker.adapters.engine.ascent import Ascent
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import HostedModel, ImageUsage, Interrupted, Loader, Memory, PreparedModel
from naru_worker.adapters.engine.loading_threads import LoadingThreads, StillRunning
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.progress import seldom
from naru_worker.adapters.engine.resident import Progress, Resident
from naru_worker.adapters.memory.bookings import Bookings
from naru_worker.adapters.ops.protocol import DeviceFault
from naru_worker.core.hub import actions, events
from naru_worker.core.residency import ModelSpec, ModelState

if TYPE_CHECKING:
    from naru_worker.adapters.engine.hub import ModelHub

_log = logging.getLogger(__name__)
Operation = actions.Fetch | actions.RaiseToHost | actions.Load | actions.Drain | actions.Unload | actions.DropHost


class Operations:
    """The hands of the hub. Not thread-safe: asyncio thread only."""

    def __init__(
        self,
        loader: Loader,
        loop: EngineLoop,
        memory: Memory,
        bookings: Bookings,
        drain: Callable[[LoadedModel, float | None], Awaitable[None]],
        load_timeout_s: float,
        threads: LoadingThreads,
    ) -> None:
        """`drain` returns when no request of the model is left; it ends them when the seconds given are over."""
        self.bookings = bookings
        self._loader = loader
        self._loop = loop
        self._memory = memory
        self._drain = drain
        self._load_timeout_s = load_timeout_s
        self._threads = threads
        self._returned_bytes = 0
        self._num_loads = 0
        self._lingering: dict[HostedModel, int] = {}
        """Closed, and still seen in memory when they were, with what stays booked for them."""

    def begin(self, hub: ModelHub, resident: Resident, action: Operation) -> None:
        """Begins an operation; it reports to the hub when it is over."""
        resident.stop = threading.Event()
        resident.began_s = hub.now_s()
        task = asyncio.get_running_loop().create_task(self._run(hub, resident, action))
        resident.task = task

        def ended(_: asyncio.Task[None]) -> None:
            if resident.task is task:
                resident.task = None

        task.add_done_callback(ended)

    def trim_kv(self, hub: ModelHub, resident: Resident, num_bytes: int) -> None:
        """Has an engine give up cached prefixes; the ledger shows what came of it."""
        model = resident.model
        aio = asyncio.get_running_loop()
        if model is None:
            return

        def trim() -> None:
            model.engine.trim_kv(num_bytes)
            left = self.bookings.ledger.kv_bytes(model.name)
            aio.call_soon_threadsafe(hub.report, events.KVChanged({model.name: left}))

        self._loop.call(trim)

    def bytes_returned(self) -> int:
        """Bytes that an unload had missed and that have come back since; told once."""
        for hosted, num_bytes in tuple(self._lingering.items()):
            if hosted.close() == 0:
                del self._lingering[hosted]
                self._came_back(num_bytes)
        returned, self._returned_bytes = self._returned_bytes, 0
        return returned

    def image_usage(self) -> ImageUsage:
        """Bytes of packed images on this node."""
        return self._loader.image_usage()

    def find(self, spec: ModelSpec) -> int | None:
        """Bytes of a model's files on this machine; None: they are not here. Blocks on the disk."""
        return self._loader.find(spec)

    def close(self) -> None:
        """Takes no more work; threads that are stuck are left behind."""
        self._threads.close()
        self._loader.close()

    async def _run(self, hub: ModelHub, resident: Resident, action: Operation) -> None:
        try:
            event = await self._perform(hub, resident, action)
        except Exception as exc:
            if isinstance(exc, DeviceFault):
                self._loop.die(exc)
            # The top of an operation: without a report the model would stand in between for ever.
            _log.error("%s of model %s failed", type(action).__name__, resident.name, exc_info=exc)
            event = self._failed(resident, action, InternalError(f"it failed inside the worker ({type(exc).__name__})"))
        # The next operation may begin while this task still ends.
        resident.task = None
        hub.report(event)

    async def _perform(self, hub: ModelHub, resident: Resident, action: Operation) -> events.Result:
        if isinstance(action, actions.Drain | actions.Unload | actions.DropHost):
            return await self._bring_down(resident, action)
        return await self._bring_near(hub, resident, action)

    async def _bring_near(
        self, hub: ModelHub, resident: Resident, action: actions.Fetch | actions.RaiseToHost | actions.Load
    ) -> events.Result:
        """An operation that may fail, and how it did."""
        hosted_before = resident.hosted
        try:
            if isinstance(action, actions.Fetch):
                return await self._fetch(hub, resident, action)
            if isinstance(action, actions.RaiseToHost):
                return await self._raise_to_host(resident, action)
            return await self._load(hub, resident, action)
        except Interrupted:
            await self._drop_host(resident)
            return events.Stopped(resident.name, action.attempt)
        except TimeoutError:
            error: NaruError = self._late_error(resident)
        except DeviceFault:
            raise
        except Unavailable as exc:
            # A load's, for now: weights that were in host memory before are there still.
            if hosted_before is not None and resident.hosted is hosted_before:
                return self._failed(resident, action, exc, is_in_host=True)
            error = exc
        except NaruError as exc:
            error = exc
        except MemoryError:
            error = LoadError(f"model {resident.name!r} does not fit into memory; unload another model")
        # The hub takes a model whose operation failed for gone, host memory included.
        await self._drop_host(resident)
        return self._failed(resident, action, error)

    def _failed(
        self, resident: Resident, action: Operation, error: NaruError, *, is_in_host: bool = False
    ) -> events.Result:
        resident.error = error
        is_permanent = isinstance(error, LoadError) and error.param == "memory"
        return events.Failed(resident.name, action.attempt, error.message, is_permanent, is_in_host=is_in_host)

    # --- up -----------------------------------------------------------------------------------------------------------

    async def _fetch(self, hub: ModelHub, resident: Resident, action: actions.Fetch) -> events.Result:
        spec = resident.spec
        assert spec is not None
        aio, current, stop = asyncio.get_running_loop(), resident.task, resident.stop

        def show(progress: Progress) -> None:
            if resident.task is current and resident.state is ModelState.FETCHING:
                hub.show(resident, progress)

        has_moved = False

        def on_progress(progress: Progress) -> None:
            nonlocal has_moved
            if stop.is_set():
                raise Interrupted
            has_moved |= progress.bytes_done > 0
            aio.call_soon_threadsafe(show, progress)

        prepared = await self._get_prepared(resident, spec, on_progress, stop)
        if has_moved:
            resident.fetch_s = hub.now_s() - resident.began_s
        resident.prepared, resident.prepared_spec, resident.error = prepared, spec, None
        return events.Fetched(resident.name, action.attempt, prepared.footprint)

    async def _get_prepared(
        self, resident: Resident, spec: ModelSpec, on_progress: Callable[[Progress], None], stop: threading.Event
    ) -> PreparedModel:
        def get() -> PreparedModel:
            last = resident.prepared
            if last is not None and resident.prepared_spec == spec and last.is_current():
                return last
            return self._loader.prepare(resident.name, spec, on_progress, stop)

        on_progress(Progress(ModelState.FETCHING, detail=spec.uri))
        return await self._threads.run(resident.stop, self._limit_s(resident), get, lambda late: None)

    async def _raise_to_host(self, resident: Resident, action: actions.RaiseToHost) -> events.Result:
        prepared, stop = resident.prepared, resident.stop
        assert prepared is not None

        def raise_() -> HostedModel:
            hosted = prepared.open()
            try:
                hosted.make_present(stop)
            except BaseException:
                hosted.close()
                raise
            return hosted

        def discard(late: HostedModel | None) -> None:
            if late is not None:
                late.close()

        resident.hosted = await self._threads.run(stop, self._limit_s(resident), raise_, discard)
        resident.error = None
        return events.HostReached(resident.name, action.attempt)

    async def _load(self, hub: ModelHub, resident: Resident, action: actions.Load) -> events.Result:
        prepared = resident.prepared
        assert prepared is not None
        was_asleep = self.bookings.is_asleep(resident.name)
        if not self.bookings.take(resident.name, prepared.footprint):
            return events.NoRoom(resident.name, action.attempt, max(0, self.bookings.ledger.free_bytes()))
        if self._memory.available_bytes() < action.num_bytes:
            self.bookings.give_back(resident.name, is_asleep=was_asleep)
            available = self._memory.available_bytes()
            raise (Unavailable if was_asleep else LoadError)(
                f"model {resident.name!r} needs {action.num_bytes / 1e6:,.1f} MB, the machine has "
                f"{available / 1e6:,.1f} MB left; free memory or lower memory_budget_bytes"
            )
        hub.show(resident, Progress(ModelState.LOADING, 0, action.num_bytes, prepared.detail))
        try:
            model = await self._bring_up(hub, resident, prepared, action.num_bytes)
        except StillRunning as exc:
            # Its memory comes back when the thread does, if ever.
            held = self.bookings.held_bytes(resident.name)
            await self._take_back(resident, held)
            resident.hosted = None
            exc.future.add_done_callback(lambda _: self._came_back(held))
            error = self._late_error(resident)
            return events.Failed(resident.name, action.attempt, error.message, unreturned_bytes=held)
        except BaseException:
            await self._take_back(resident, is_asleep=was_asleep)
            raise
        resident.error = None
        resident.model = model
        self._num_loads += 1
        resident.epoch = self._num_loads
        hub.show(resident, Progress(ModelState.READY, detail=model.facts.revision))
        return events.Loaded(resident.name, action.attempt, hub.now_s() - resident.began_s)

    async def _bring_up(
        self, hub: ModelHub, resident: Resident, prepared: PreparedModel, num_bytes: int
    ) -> LoadedModel:
        aio, current, stop = asyncio.get_running_loop(), resident.task, resident.stop

        def show(done: int, total: int) -> None:
            if resident.task is current and resident.state is ModelState.LOADING:
                hub.show(resident, Progress(ModelState.LOADING, num_bytes * done // total, num_bytes, prepared.detail))

        def start(model: LoadedModel) -> None:
            resident.model = model
            if not stop.is_set():
                self._loop.add(model.engine)
                hub.open_engine(resident, model)

        def on_share(done: int, total: int) -> None:
            aio.call_soon_threadsafe(show, done, total)

        ascent = Ascent(prepared, resident.hosted, stop, start, seldom(on_share))
        try:
            hosted, model = await self._threads.run(stop, self._limit_s(resident), ascent.load, ascent.discard)
        except BaseException:
            resident.hosted = ascent.left_open or resident.hosted
            raise
        resident.hosted = hosted
        if ascent.begun is None:
            start(model)
        return model

    async def _bring_down(
        self, resident: Resident, action: actions.Drain | actions.Unload | actions.DropHost
    ) -> events.Result:
        if isinstance(action, actions.Unload):
            return await self._unload(resident, action)
        if isinstance(action, actions.DropHost):
            await self._drop_host(resident)
            return events.HostDropped(resident.name, action.attempt)
        assert resident.model is not None
        await self._drain(resident.model, action.timeout_s)
        return events.Drained(resident.name, action.attempt)

    # --- down ---------------------------------------------------------------------------------------------------------

    async def _take_back(self, resident: Resident, unreturned_bytes: int = 0, *, is_asleep: bool = False) -> None:
        """After a load that failed: its engine, if it had begun, and its bytes, as they were before."""
        model, resident.model = resident.model, None
        if model is not None:
            await self._detach(model)
            await self._drain(model, 0.0)
            if not unreturned_bytes:
                # Else the loading thread still uses it, and what is late is released when that ends.
                await self._threads.run_freely(model.release)
        if not unreturned_bytes:
            await self._threads.run_freely(self._memory.release)
        self.bookings.give_back(resident.name, unreturned_bytes, is_asleep=is_asleep)

    def _came_back(self, num_bytes: int) -> None:
        self.bookings.forgive(num_bytes)
        self._returned_bytes += num_bytes

    def _late_error(self, resident: Resident) -> LoadError:
        limit_s = self._limit_s(resident)
        resident.error = error = LoadError(f"model {resident.name!r} did not load within {limit_s:g} s")
        return error

    def _limit_s(self, resident: Resident) -> float:
        return resident.load_timeout_s or self._load_timeout_s

    async def _unload(self, resident: Resident, action: actions.Unload) -> events.Result:
        model = resident.model
        assert model is not None
        await self._detach(model)
        resident.model = None
        hosted = resident.hosted
        missing, error, not_kept = 0, "", ""

        def release() -> None:
            nonlocal missing, not_kept
            model.release()
            if hosted is not None:
                if action.keep_host:
                    not_kept = hosted.keep()
                if not action.keep_host or not_kept:
                    missing = hosted.close()
            self._memory.release()

        try:
            await self._threads.run_freely(release)
        except DeviceFault:
            raise
        except Exception as exc:
            # Whatever it was: the model is out of the engine, and what it held is not free.
            _log.error("unloading model %s failed", resident.name, exc_info=exc)
            error = f"it failed inside the worker ({type(exc).__name__})"
            missing = self.bookings.held_bytes(resident.name)
            not_kept = error if action.keep_host else ""
        else:
            if missing and hosted is not None:
                self._lingering[hosted] = missing
        is_kept = action.keep_host and not not_kept
        if not is_kept:
            resident.hosted = None
        self.bookings.give_back(resident.name, missing, is_asleep=is_kept)
        if not_kept:
            _log.warning("model %s does not wait in host memory: %s", resident.name, not_kept)
        if missing:
            _log.warning("unloading model %s gave back %d bytes less than it held", resident.name, missing)
        return events.Unloaded(resident.name, action.attempt, missing, error, not_kept)

    async def _drop_host(self, resident: Resident) -> None:
        hosted, resident.hosted = resident.hosted, None
        if hosted is not None:
            closing = hosted

            def close() -> None:
                closing.close()

            await self._threads.run_freely(close)
        self.bookings.leave_host(resident.name)

    async def _detach(self, model: LoadedModel) -> None:
        """Returns once the engine thread touches the model no more."""
        aio = asyncio.get_running_loop()
        removed = asyncio.Event()
        self._loop.remove(model.engine, lambda: aio.call_soon_threadsafe(removed.set))
        await removed.wait()
